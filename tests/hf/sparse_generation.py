"""Compares generation of models whose layers gather keys with that of plain ones, token for token.

`python -m tests.hf.sparse_generation` prints a line for each type, on 2 ranks and on 4.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ds_seqpar.base.errors import SeqParError
from hf_integration import patch_attention
from tests import oracle
from tests.dist.ranks import make
from tests.hf.every_type import tiny
from tests.hf.in_fp64 import InFP64, tiny_fp64
from tests.launch import on_ranks

PICKED = ("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4")  # latents with an index
INDEXED = ("deepseek_v4", "doge", "minimax_m3_vl_text")
OWN = (
    *("bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "megatron-bert", "mpt"),
    *("rembert", "roformer", "xglm"),
)
STATES = ("inkling2_text", "inkling_text", "qwen4_exp", "qwen4_exp_text")  # beside layers that gather keys
FP32 = ("xglm",)
SECTIONS = {2: {"size": 2, "ulysses": 1}, 4: {"size": 4, "ulysses": 2}}
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 2.0}
# name -> (whether rows are padded, arguments of generate)
CASES = {
    "greedy": (False, GREEDY),
    "padded": (True, GREEDY),
    "in chunks": (False, {**GREEDY, "prefill_chunk_size": 10}),
    "sampled": (False, SAMPLED),
    "beams": (False, {**GREEDY, "num_beams": 2}),
}
SPECIAL = [0, 1, 2]  # whose embeddings may be 0, from which an index scores all keys 0
EXACT = "exact"


def model_of(name):
    model = (tiny if name in FP32 else tiny_fp64)(name).eval()
    model.generation_config.eos_token_id = None
    text = model.config.get_text_config(decoder=True)
    model.config.use_cache = text.use_cache = model.generation_config.use_cache = True
    if hasattr(text, "output_router_logits"):  # whose balance takes no mask as long as the cache
        text.output_router_logits = False
    return model


def conversation(model, ids, mask, **options):
    """Return (tokens, scores of the new ones) of each of two turns on one cache."""
    said, cache = [], None
    for turn in range(2):
        torch.manual_seed(7)
        output = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5, pad_token_id=0, suppress_tokens=SPECIAL,
            return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
        cache = output.past_key_values
        said.append((output.sequences, torch.stack(output.scores, 1)))
        more = torch.arange(5, 12 - turn).expand(len(ids), -1) * 3
        ids = torch.cat([output.sequences, more], 1)
        mask = F.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return said


def by_row(model, ids, mask, **options):
    """Return the same, of each row by itself and without its padding: models may count blocks or bytes from that on."""
    rows = []
    for tokens, real in zip(ids, mask, strict=True):
        padding = len(real) - int(real.sum())
        said = conversation(model, tokens[None, padding:], real[None, padding:], **options)
        rows.append([(F.pad(ids, (padding, 0)), scores) for ids, scores in said])
    return [tuple(map(torch.cat, zip(*turn, strict=True))) for turn in zip(*rows, strict=True)]


def prompts(padded):
    ids = torch.randint(3, 60, (2, 27), generator=torch.Generator().manual_seed(3))  # which 2 ranks do not divide
    mask = torch.ones_like(ids)
    mask[0, :9] = 0 if padded else 1
    return ids.masked_fill(mask == 0, 0), mask


def outcome(plain, shared, case):
    """Return whether a model that shares sequences says what the plain one says."""
    padded, options = CASES[case]
    expected = (by_row if padded else conversation)(plain, *prompts(padded), **{**options, "prefill_chunk_size": None})
    found = conversation(shared, *prompts(padded), **options)
    (tokens, scores), (wanted, scores_wanted) = (zip(*said, strict=True) for said in (found, expected))
    same = all(map(torch.equal, tokens, wanted))
    gap = max(map(_error, scores, scores_wanted))
    return EXACT if same and gap < (1e-9 if plain.dtype == torch.float64 else 1e-5) else f"wrong by {gap:.0e}"


def _error(found, wanted):
    return oracle.error(*(x.nan_to_num(neginf=0) for x in (found, wanted)))


def outcomes(names, cases=tuple(CASES), patch=patch_attention):
    """On a rank: {(type, case): "exact", or what is wrong, or the sentence that was raised}."""
    sp, found = make(prove="never", **SECTIONS[dist.get_world_size()]), {}
    for name in names:
        with contextlib.nullcontext() if name in FP32 else InFP64():
            plain, shared = model_of(name), patch(model_of(name), sp)
            for case in cases:
                try:
                    found[name, case] = outcome(plain, shared, case)
                except SeqParError as error:
                    found[name, case] = f"refused: {error}"
    return found


if __name__ == "__main__":
    for world in SECTIONS:
        for name in (*PICKED, *INDEXED, *OWN, *STATES):
            by_case = on_ranks(world, outcomes, (name,), timeout=300)[0]
            print(f"{world} ranks, {name}: " + "; ".join(f"{case} {x}" for (_, case), x in by_case.items()), flush=True)
