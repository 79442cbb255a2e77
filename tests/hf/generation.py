"""Compares cached forwards and generation of models that share sequences with those of plain models.

`CASES` of a launch are compared one after another in the same processes. Of each case one rank computes what the plain
model gives, and all ranks are told.
"""

import copy
import dataclasses

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from ds_seqpar.base.errors import SeqParError
from hf_integration import patch_attention
from tests import oracle
from tests.dist.ranks import make
from tests.hf.every_type import config_of, enlivened

# family -> what its attention has
FAMILIES = {
    "llama": "fewer key/value heads than query heads",
    "olmo2": "norms over all heads",
    "gpt2": "learned positions, as many key/value heads as query heads",
    "opt": "positions counted by the mask",
    "mistral": "windows in all layers",
    "qwen2": "biases of keys, windows in some layers",
    "gemma2": "softcap, windows in some layers",
    "cohere2": "no positions in layers without a window",
    "gpt_oss": "sinks, windows in some layers, experts",
    "llama4_text": "chunks in some layers, temperature by position, experts",
    "mixtral": "experts",
    "deepseek_v3": "keys and values of other sizes, from a latent",
    "laguna": "query heads that differ by layer",
    "gemma4_text": "head sizes that differ by layer, layers that read another layer's keys",
}
LENGTHS = ("sliding_window", "attention_chunk_size")  # of windows and chunks
# ranks -> name -> the "sequence_parallel" section
SECTIONS = {
    1: {"alone": {}},
    2: {
        "zigzag": {"ulysses": 1},
        "striped": {"ulysses": 1, "layout": "striped"},
        "u2": {"ulysses": 2},
        "distflash": {"ulysses": 1, "schedule": "distflash"},
        "2d": {"ulysses": 1, "schedule": "attention2d", "rows": 2, "cols": 1, "overlap": True},
    },
    3: {"triangle": {"ulysses": 1, "schedule": "triangle"}},
    4: {
        "zigzag": {"ulysses": 1},
        "contiguous": {"ulysses": 1, "layout": "contiguous", "overlap": True},
        "u2r2": {"ulysses": 2, "layout": "striped"},
        "u4": {"ulysses": 4},
        "double": {"ulysses": 1, "schedule": "double_ring", "ring_size": 2},
        "2d": {"ulysses": 1, "schedule": "attention2d", "rows": 2, "cols": 2},
        "wallfacer": {"ulysses": 1, "schedule": "wallfacer", "team": 2},
        "distflash": {"ulysses": 1, "schedule": "distflash"},
        "u2q": {"ulysses": 2, "rotate_forward": "q", "head_chunks": 2},
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What both models do.

    Attributes:
        section: The name of a section; None on a plain model.
        window: The length of windows and chunks, where the family has any.
        lengths: Of the prompt, in rows that are padded on their left; one length: a row without padding.
        turns: New tokens of each further forward on the kept cache.
        positions: Whether forwards are given position_ids.
        new: Tokens to generate; 0: forwards are compared.
        sample: Whether to sample.
        chunk: `prefill_chunk_size`.
    """

    family: str
    section: str | None = None
    window: int = 8
    lengths: tuple[int, ...] = (70,)
    turns: tuple[int, ...] = ()
    positions: bool = False
    new: int = 0
    sample: bool = False
    chunk: int | None = None

    @property
    def prompt(self):
        return max(self.lengths)

    @property
    def given(self):
        """Tokens of a row that are given."""
        return self.prompt + sum(self.turns)

    @property
    def tokens(self):
        """Tokens of a row when all is done."""
        return self.given + self.new


def dense(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """Attend as transformers' eager attention does, with a softmax in the dtype of the scores."""
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if attention_mask is None else scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ values).transpose(1, 2), None


DENSE = "dense"
AttentionInterface.register(DENSE, dense)
AttentionMaskInterface.register(DENSE, eager_mask)


def has_windows(family):
    text = config_of(family).get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in LENGTHS)


def build(family, window=8, tokens=256, dtype=torch.float32, seed=0):
    """Return a plain model in evaluation mode, with the same weights for the same seed."""
    config = copy.deepcopy(config_of(family))
    text = config.get_text_config(decoder=True)
    for name in LENGTHS:
        if getattr(text, name, None):
            setattr(text, name, window)
    config.use_cache, text.max_position_embeddings = True, max(tokens + 1, 128)
    config.tie_word_embeddings = text.tie_word_embeddings = False  # else a token is followed by itself
    if hasattr(text, "floor_scale"):  # of llama4's temperature: more tokens than a small copy is looked at with
        text.floor_scale = 40
    if hasattr(text, "output_router_logits"):  # whose balance takes no mask as long as the cache
        text.output_router_logits = False
    torch.manual_seed(seed)
    implementations = {"attn_implementation": DENSE, "experts_implementation": "eager"}  # which take fp64
    model = AutoModelForCausalLM.from_config(config, **implementations).float()
    model.generation_config.eos_token_id = None
    return enlivened(model).to(dtype).eval()


def prompts(case):
    """Return ids and mask of all tokens that a case gives."""
    ids = torch.randint(3, 64, (len(case.lengths), case.given), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(case.given) >= case.prompt - torch.tensor(case.lengths)[:, None]
    return ids.masked_fill(~mask, 0), mask.long()


def forwards(model, case):
    """Return logits (rows, tokens, vocabulary) of forwards on one cache, 0 for padding, and the cache."""
    ids, mask = prompts(case)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, begin, logits = None, 0, []
    for count in (case.prompt, *case.turns):
        end = begin + count
        given = {"attention_mask": mask[:, :end]} if len(case.lengths) > 1 else {}
        given |= {"position_ids": positions[:, begin:end]} if case.positions else {}
        output = model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, **given)
        cache, begin = output.past_key_values, end
        logits.append(whole(output.logits))
    return torch.cat(logits, 1) * mask[..., None], cache


def generated(model, case):
    """Return all tokens and the logits of the new ones of `model.generate`, called again on its cache for each turn."""
    ids, mask = prompts(case)
    tokens, cache, logits = ids[:, : case.prompt], None, []
    begin, count = case.prompt, case.new // (len(case.turns) + 1)
    torch.manual_seed(7)
    for turn in (*case.turns, 0):
        options = {} if case.chunk is None else {"prefill_chunk_size": case.chunk}
        output = model.generate(
            tokens, attention_mask=F.pad(mask[:, : case.prompt], (0, tokens.shape[1] - case.prompt), value=1),
            past_key_values=cache, max_new_tokens=count, do_sample=case.sample, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True, **options,
        )  # fmt: skip
        logits += map(whole, output.logits)
        cache, tokens = output.past_key_values, torch.cat([output.sequences, ids[:, begin : begin + turn]], 1)
        begin += turn
    return tokens, torch.stack(logits, 1)


def whole(x):
    return x.whole() if hasattr(x, "whole") else x


def done(model, case):
    """Return a case's tokens, None where it has none, and its logits."""
    with torch.no_grad():
        return generated(model, case) if case.new else (None, forwards(model, case)[0])


def model_of(case):
    """Return the plain model of a case: in fp64 where tokens are compared, which must not differ."""
    return build(case.family, case.window, case.tokens, torch.float64 if case.new else torch.float32)


def gap(found, expected):
    """Return the error of logits, infinite where tokens differ."""
    same = expected[0] is None or torch.equal(found[0], expected[0])
    return oracle.error(found[1], expected[1]) if same else float("inf")


def compared(cases, patch=patch_attention):
    """On a rank: {case: the error of the model that `patch(model, sp)` makes, or the sentence that it raised}."""
    world, rank = dist.get_world_size(), dist.get_rank()
    expected, found = [None] * world, {}
    dist.all_gather_object(expected, {case: done(model_of(case), case) for case in cases[rank::world]})
    expected = {case: x for each in expected for case, x in each.items()}
    sps = {case.section: make(size=world, prove="never", **SECTIONS[world][case.section]) for case in cases}
    for case in cases:
        try:
            found[case] = gap(done(patch(model_of(case), sps[case.section]), case), expected[case])
        except SeqParError as error:
            found[case] = f"{type(error).__name__}: {error}"
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
    return found
