"""`generate` of a patched model gives the tokens of the unpatched model on one process, on all ranks."""

import functools
import io
import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from hf_integration import patch_attention
from hf_integration.generation.cache import ShardedLayer
from tests.dist.ranks import make
from tests.hf.llama import MODES, llama, with_lora
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
NEW = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
LETTERS = f"{string.digits}{string.ascii_letters}-+"
IDS = torch.arange(3, 25).view(2, 11) * 7 % 64
MASK = torch.ones_like(IDS)
MASK[0, :6] = 0


def varied(**changes):
    """In fp64, with weights so large that greedy tokens vary."""
    return llama(initializer_range=0.3, **changes).double().eval()


def twins(case, of=varied):
    """A patched model, and the same unpatched."""
    sp = make(**MODES[case])
    return sp, patch_attention(of(), sp), of()


def letters():
    """A tokenizer whose tokens are letters."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1")


class Streamer(BaseStreamer):
    """Writes all tokens in the end."""

    def __init__(self, file):
        self.file, self.tokens = file, []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.file.write(str(self.tokens))


class Even(LogitsProcessor):
    """Allows even tokens alone, and every third time odd ones."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == (self.calls % 3 > 0), -torch.inf)


class Enough(StoppingCriteria):
    """Ends a row once the sum of its new tokens is large."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, 11:].sum(1) > 150


FEW = {**NEW, "max_new_tokens": 3}
SAMPLE = {"do_sample": True, **NEW}
# name -> arguments of generate, which a call must not share with another
CASES = {
    "greedy": lambda: NEW,
    "padded on the left": lambda: {"attention_mask": MASK, **NEW},
    "without a cache": lambda: {"use_cache": False, "attention_mask": MASK, **NEW},
    "temperature, top-k": lambda: {"temperature": 2.0, "top_k": 9, **SAMPLE},
    "top-p, padded": lambda: {"top_p": 0.8, "attention_mask": MASK, **SAMPLE},
    "min-p, penalties": lambda: {"min_p": 0.01, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, **SAMPLE},
    "several of a prompt": lambda: {"num_return_sequences": 3, "attention_mask": MASK, **SAMPLE},
    "a stop string": lambda: {"stop_strings": [LETTERS[3] + LETTERS[11], LETTERS[16]], "tokenizer": letters(), **NEW},
    "the end in some rows": lambda: {**NEW, "eos_token_id": [11, 23], "attention_mask": MASK},
    "tensors of special tokens": lambda: {
        **{**NEW, "eos_token_id": torch.tensor([11, 23, 40]), "pad_token_id": torch.tensor(0)},
        **{"bos_token_id": torch.tensor([9]), "suppress_tokens": torch.tensor([1, 2, 5]), "attention_mask": MASK},
    },
    "a padding token that ends": lambda: {**NEW, "eos_token_id": torch.tensor([0, 11, 23])},
    "a processor": lambda: {"logits_processor": LogitsProcessorList([Even()]), **NEW},
    "a criterion": lambda: {"stopping_criteria": StoppingCriteriaList([Enough()]), **NEW},
    "in chunks": lambda: {"prefill_chunk_size": 4, "attention_mask": MASK, **NEW},
    "guidance": lambda: {"guidance_scale": 1.5, "negative_prompt_ids": IDS[:, 3:], **NEW},
    "beams": lambda: {"num_beams": 3, "num_return_sequences": 2, "attention_mask": MASK, **NEW},
    "sampled beams": lambda: {"num_beams": 2, **SAMPLE},
    "a config": lambda: {"generation_config": GenerationConfig(top_k=5, **SAMPLE)},
    "a limit of time": lambda: {"max_time": 600.0, **NEW},
    "a limit of time as a criterion": lambda: {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(0)]), **NEW},
}


QUICK = ("top-p, padded", "tensors of special tokens", "beams", "a limit of time as a criterion")


@pytest.mark.parametrize(
    ("ranks", "case", "names"),
    [
        (2, "r2", QUICK),
        pytest.param(2, "u2", [*CASES], marks=pytest.mark.slow),
        pytest.param(4, "u2r2", [*CASES], marks=pytest.mark.slow),
    ],
)
@on_each_of("ranks", keep="deepspeed")
def test_all_ways_to_choose_tokens(ranks, case, names):
    """Where ranks have other random numbers, all draw those of the sequence's first rank."""
    sp, model, plain = twins(case)
    for seeds, names_of in ((0, names[:1]), (1, names)):  # the same on all ranks, and others
        for name in names_of:
            torch.manual_seed(5)
            expected, after = plain.generate(IDS, **CASES[name]()), torch.get_rng_state()
            torch.manual_seed(5 + seeds * sp.rank)
            before = torch.get_rng_state()
            assert torch.equal(model.generate(inputs=IDS, **CASES[name]()), expected), name
            assert torch.equal(torch.get_rng_state(), before if seeds and sp.rank else after), name
    assert expected.shape[1] == 12  # after one token the time is over


def near(a, b):
    """Whether two outputs of generate are the same, up to rounding, but for their caches."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-5 if a.dtype == torch.float32 else 1e-12)
    return len(a) == len(b) and all(near(x, y) for x, y in zip(a, b, strict=True))


@on_each_of(2, keep="deepspeed")
def test_prompts_and_outputs_of_other_kinds():
    _, model, plain = twins("u2", functools.partial(varied, num_hidden_layers=1))
    asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    for more in ({}, {"num_beams": 2}):
        ours, theirs = (x.generate(IDS, return_dict_in_generate=True, **asked, **more, **FEW) for x in (model, plain))
        assert ours.keys() == theirs.keys()
        wrong = [name for name, x in theirs.items() if name != "past_key_values" and not near(ours[name], x)]
        assert wrong == [], more
    embeds = plain.get_input_embeddings()(IDS)
    prompts = {
        "one token": {"inputs": IDS[:1, :1]},
        "a token and padding": {"inputs": IDS[:, :2], "attention_mask": torch.tensor([[0, 1], [1, 1]])},
        "no prompt": {"bos_token_id": 9},
        "embeddings": {"inputs_embeds": embeds, "attention_mask": MASK},
        "embeddings and tokens": {"inputs_embeds": embeds, "input_ids": IDS},
    }
    for name, prompt in prompts.items():
        assert torch.equal(model.generate(**prompt, **FEW), plain.generate(**prompt, **FEW)), name
    with torch.inference_mode():
        assert torch.equal(model.generate(IDS.clone(), **FEW), plain.generate(IDS, **FEW))


def turns(model):
    """Three turns of a conversation on one cache: tokens so far after each, and the cache."""
    ids, mask, cache, said = IDS, MASK, None, []
    for turn in range(3):
        out = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            return_dict_in_generate=True,
            prefill_chunk_size=turn or None,
            **FEW,
        )
        said.append(out.sequences)
        cache = out.past_key_values
        ids = torch.cat([out.sequences, IDS[:, turn : turn + 5 - turn]], 1)
        mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], 1)
    return said, cache


@on_each_of(2, keep="deepspeed")
def test_turns_of_a_conversation_go_on_with_the_cache():
    _, model, plain = twins("r2")
    (ours, cache), (theirs, _) = turns(model), turns(plain)
    assert all(map(torch.equal, ours, theirs))
    assert type(cache) is DynamicCache
    assert all(isinstance(layer, ShardedLayer) for layer in cache.layers)


@on_each_of(2, keep="deepspeed")
def test_streamers_pipelines_and_adapters():
    sp, model, plain = twins("r2", functools.partial(varied, num_hidden_layers=1))
    said = io.StringIO()
    streamer = Streamer(said) if sp.rank else None
    expected = plain.generate(IDS[:1], **FEW)
    assert torch.equal(model.generate(IDS[:1], streamer=streamer, **FEW), expected)
    assert said.getvalue() == (str(expected[0].tolist()) if sp.rank else "")
    texts = []
    for x, seed in ((model, 5 + sp.rank), (plain, 5)):  # pipelines sample
        torch.manual_seed(seed)
        texts.append(pipeline("text-generation", model=x, tokenizer=letters())(["abc", "f"], **FEW))
    assert texts[0] == texts[1]
    adapted, alone = (with_lora(x, "q_proj", "down_proj").double() for x in (model, plain))
    unlike, expected = expected, alone.generate(input_ids=IDS[:1], **FEW)
    assert not torch.equal(unlike, expected)
    for x in (adapted, torch.compile(adapted, backend="eager")):
        assert torch.equal(x.generate(input_ids=IDS[:1], **FEW), expected)
