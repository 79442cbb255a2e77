"""Every supported family on 4 ranks: logits, loss and all gradients are those of the unpatched eager model, whatever
the batch: packed, padded on either side, of a length that does not divide, with windows shorter and longer than a
shard. Sharded, whole, and with what saves memory."""

import functools

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.whole import WholeTensor
from hf_integration import check_patch, whole_sequences
from hf_integration.look.facts import TESTED
from hf_integration.look.in_fp64 import fp64
from hf_integration.look.known import windows
from tests import oracle
from tests.dist.ranks import make
from tests.grids import cover
from tests.hf.families import EXPERTS, FAMILIES, SIZE, batch_of, collated, gradients, model_of, real, told
from tests.hf.in_fp64 import limit_beside, throughout
from tests.hf.llama import IGNORE, averaged, gap
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
SECTIONS = {
    "u2r2": {"size": 4, "ulysses": 2},
    "u4": {"size": 4, "ulysses": 4},
    "r4": {"size": 4, "ulysses": 1, "layout": "zigzag"},
    "mesh": {"size": 4, "ulysses": 1, "schedule": "mesh", "mesh": [2, 1, 2]},
}
WINDOWS = (5, 20)  # a shard has 12 or 13 tokens
KINDS = ("odd", "packed", "left", "right")
NAMES = sorted(FAMILIES)


def plain(model, batch):
    """(logits, loss, gradients by name) of the unpatched model. No label counts that is predicted across the end of a
    document, or from padding."""
    model.zero_grad()
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    given = {**batch, "shift_labels": shifted}
    if "position_ids" in batch:
        ends = torch.nn.functional.pad(batch["position_ids"][:, 1:], (0, 1), value=0) == 0
        given["shift_labels"] = shifted.masked_fill(ends, IGNORE)
    if "attention_mask" in batch:
        given["shift_labels"] = shifted.masked_fill(batch["attention_mask"] == 0, IGNORE)
    with told(model, batch):
        output = model(**given, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), output.loss.item(), gradients(model)


def in_fp64(make, batch):
    """(what `plain` gives in fp64, limits for models in fp32 beside it). make: makes the model."""
    truth, own = throughout(plain)(fp64(make()), batch), plain(make(), batch)
    return truth, [limit_beside(error) for error in errors(own, truth, batch)]


def errors(found, expected, batch):
    """The greatest errors of (logits, loss, gradients); no logits where the loss is in tiles."""
    logits = 0 if found[0] is None else oracle.error(found[0] * real(batch), expected[0] * real(batch))
    return logits, abs(found[1] - expected[1]) / expected[1], gap(found[2], expected[2])


def sharded(model, sp, batch):
    """The same of the patched model, which is unpatched again; no logits where the loss is in tiles."""
    model.zero_grad()
    model.patch_attention(sp)
    shard = sp.shard_batch(batch)
    output = model(**shard)
    output.loss.backward()
    logits = None if output.logits is None else sp.gather(output.logits.detach(), 1, shard.get("placement"))
    found = logits, sp.mean_loss(output.loss), averaged(model)
    model.unpatch_attention()
    return found


def whole(model, sp, kind):
    """The same of the patched model on a whole batch."""
    model.zero_grad()
    model.patch_attention(sp)
    batch = collated(kind)
    with told(model, batch):
        output = model(**batch, use_cache=False)
    output.loss.backward()
    assert isinstance(output.logits, WholeTensor)
    return output.logits.detach(), output.loss.item(), averaged(model)


def saving(name, window, section, batch):
    """The same of a sharded batch with tiles, head chunks and checkpoints."""
    tiles = {"mlp_tiles": "auto" if name in EXPERTS else 5, "loss_tiles": 3}
    model = model_of(name, window).train()
    model.gradient_checkpointing_enable()
    return sharded(model, make(**section, head_chunks=2, **tiles), batch)


def compared(cases, expected):
    """By case and call the greatest errors of logits, loss and gradients. expected: what `plain` gives in fp64, by case
    but for the section."""
    sps = {name: make(**section) for name, section in SECTIONS.items()}
    found = {}
    for name, window, kind, section in cases:
        model, batch = model_of(name, window), batch_of(kind)
        calls = {
            "sharded": sharded(model, sps[section], batch),
            "whole": whole(model, sps[section], kind),
            "saving": saving(name, window, SECTIONS[section], batch),
        }
        for call, got in calls.items():
            found[name, window, kind, section, call] = errors(got, expected[name, window, kind], batch)
    return found


# every other family with the same: what differs between families is their attention, and not how a batch is shared
ONCE = [(5, "packed", "u2r2"), (20, "left", "r4"), (20, "packed", "mesh"), (5, "odd", "u4")]
FEW = [(name, *ONCE[number % len(ONCE)]) for number, name in enumerate(NAMES)]
PAIRS = [tuple(case.values()) for case in cover(name=NAMES, window=WINDOWS, kind=KINDS, section=tuple(SECTIONS))]


# axolotl#3608, TransformerEngine#1930, verl#6475: packed documents attended to one another, or labels leaked.
# accelerate#4177, prime-rl PR 2828: windows were dropped; N keys were counted as N + 1
@pytest.mark.parametrize("names", [NAMES[:5], NAMES[5:10], NAMES[10:]], ids="-".join)
@pytest.mark.parametrize("cases", [FEW, pytest.param(PAIRS, marks=pytest.mark.slow)], ids=["few", "pairs"])
def test_a_family_is_what_it_is_unpatched(names, cases):
    cases = [case for case in cases if case[0] in names]
    truth = {case[:3]: in_fp64(functools.partial(model_of, *case[:2]), batch_of(case[2])) for case in cases}
    expected = {case: numbers for case, (numbers, _) in truth.items()}
    for found in on_ranks(4, compared, cases, expected, timeout=900):
        assert len(found) == 3 * len(cases)
        for case, its in found.items():
            limits = truth[case[:3]][1]
            assert all(error < limit for error, limit in zip(its, limits, strict=True)), (case, its, limits)


def local_forwards():
    """Forwards with a cache, and of whole sequences, beside the model before it was patched; each rank tries others."""
    sp, found = make(size=2, ulysses=1), {}
    ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(24) >= torch.tensor([[0], [5]])).long()
    for name in NAMES[dist.get_rank() :: 2]:
        quiet = {"output_router_logits": False} if "output_router_logits" in FAMILIES[name] else {}
        for before in ("eager", "sdpa"):
            model = model_of(name, 5, **quiet).eval()
            if before == "sdpa" and not model._supports_sdpa:
                continue
            model.set_attn_implementation(before)
            given = {"input_ids": ids, "attention_mask": mask}
            how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
            with torch.no_grad():
                wanted = model(**given, use_cache=True).logits, model.generate(**given, **how)
                model.patch_attention(sp)
                with whole_sequences(model):
                    got = model(**given, use_cache=True).logits, model.generate(**given, **how)
            found[name, before] = all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    return found


def test_a_local_forward_uses_the_attention_that_the_model_had():
    """Windows, softcap and sinks too: sdpa has none of the last two."""
    first, second = on_ranks(2, local_forwards, timeout=600)
    found = first | second
    assert {name for name, _ in found} == set(NAMES)
    assert all(found.values()), [case for case, equal in found.items() if not equal]


def scaled(kind, **more):
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}


ORIGINAL = 32  # positions before RoPE is scaled: fewer than a sequence has, and more than half of it
FACTORS = {"long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0] * 4, "original_max_position_embeddings": ORIGINAL}
ROPES = {
    "yarn": ("llama", scaled("yarn", original_max_position_embeddings=ORIGINAL)),
    "dynamic": ("llama", scaled("dynamic")),
    "longrope": ("phi3", scaled("longrope", **FACTORS)),
    "by layer": ("gemma3_text", {"sliding_attention": scaled("default"), "full_attention": scaled("dynamic")}),
}


def with_rope(name):
    family, parameters = ROPES[name]
    original = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    return model_of(family, rope_parameters=dict(parameters), max_position_embeddings=ORIGINAL, **original)


def of_ropes(expected):
    """By RoPE: errors of logits, loss and gradients in one model's batches of one document and of packs, and whether it
    is unpatched as it was."""
    sp, found = make(size=2, ulysses=1, layout="contiguous"), {}
    for name, wanted in expected.items():
        model = with_rope(name)
        for (logits, loss, grads), kind in zip(wanted[:2], ("packed", "odd"), strict=True):
            got = sharded(model, sp, batch_of(kind))
            found[name, kind] = oracle.error(got[0], logits), abs(got[1] - loss) / loss, gap(got[2], grads)
        found[name, "unpatched"] = (oracle.error(plain(model, batch_of("odd"))[0], wanted[2][0]),)
    return found


def test_scaled_ropes_are_what_they_are_unpatched():
    """A rank that looked at its own positions alone would take them for a short sequence's."""
    expected = {}
    for name in ROPES:
        model = with_rope(name)
        expected[name] = [plain(model, batch_of(kind)) for kind in ("packed", "odd", "odd")]
        short = plain(with_rope(name), {key: x[:, :20] for key, x in batch_of("odd").items()})[0]
        assert (oracle.error(short, expected[name][1][0][:, :20]) > 1e-3) is (name != "yarn"), name
    for found in on_ranks(2, of_ropes, expected):
        for case, errors in found.items():
            assert max(errors) < 1e-5, case


def test_every_family_is_tried():
    assert sorted(TESTED) == NAMES


def test_windows_are_those_of_the_config():
    assert windows(model_of("mistral", 7)) == [7, 7]
    assert windows(model_of("qwen2", 7)) == [7, None]
    assert windows(model_of("qwen2", 7, use_sliding_window=False)) == [None, None]
    assert windows(model_of("llama")) == [None, None]


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("mistral", {"attention_dropout": 0.1}, "attention_dropout"),
        ("gpt_oss", {"attention_dropout": 0.1}, "attention_dropout"),
        ("jamba", {"num_experts": 2, "num_experts_per_tok": 1}, r"layers\.0\.mamba.*outside of"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_a_family_cannot_have_and_attention_of_another_kind_are_refused_by_name(family, changes, words):
    given = {name: x for name, x in FAMILIES.get(family, {}).items() if name != "window"}
    config = AutoConfig.for_model(family, **{**SIZE, **given, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=words):
        check_patch(model, None)
