"""Models that share sequences give the plain models' losses, numbers and gradients: families, settings, ways to call
them, checkpoints, tiles, adapters, wrappers, ZeRO stages and precisions. `conformance.py` tells how to add a case."""

import contextlib
import functools
import itertools
import types

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hf_integration.look.facts import TESTED
from tests import grids, oracle
from tests.dist.ranks import make
from tests.hf.conformance import WAYS, Case, Way, assert_cases, sharded_outputs, way, whole_outputs
from tests.hf.every_type import tiny
from tests.hf.families import EXPERTS, FAMILIES, collated, model_of, real
from tests.hf.in_fp64 import InFP64, tiny_fp64
from tests.hf.llama import IGNORE, LAYOUTS, MODES, SEQ, checkpointed, frozen, llama, ragged, small, with_lora
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
KINDS = ("odd", "packed", "left", "right")
BOTH = ("sharded", "whole")
SECTIONS = MODES | {
    "r4": {"size": 4, "ulysses": 1, "layout": "zigzag"},
    "mesh": {"size": 4, "ulysses": 1, "schedule": "mesh", "mesh": [2, 1, 2]},
}
TILES = {"mlp_tiles": 5, "loss_tiles": 3}
TWO_TILES = {"mlp_tiles": 2, "loss_tiles": 3}
AUTO = {"mlp_tiles": "auto", "loss_tiles": "auto"}
CHUNKS = {"head_chunks": 2}
AWAY, AGAIN = {"offload_checkpoints": True}, {"recompute_attention": True}


# --- ways to call a model, and losses of one's own


def preference(output, batch):
    """DPO's, of the first row over the second: no sum over tokens."""
    logps = output.logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    picked = torch.gather(logps, 2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    sums = (picked * (labels != IGNORE)).sum(-1)
    return -F.logsigmoid(0.1 * (sums[0] - sums[1]))


def without(batch, name):
    return {key: x for key, x in batch.items() if key != name}


way("by position")(lambda model, batch: model(batch["input_ids"], labels=batch["labels"]).loss)
way("divided")(lambda model, batch: model(**batch, num_items_in_batch=torch.tensor(7)).loss)
way("preference")(lambda model, batch: preference(model(**batch), batch))


@way("preference and more")
def preference_and_more(model, batch):
    output = model(**batch)
    return preference(output, batch) * output.loss.sqrt() + output.logits[..., :3].amax()


@way("embeddings")
def embedded(model, batch):
    return model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]), **without(batch, "input_ids")).loss


@way("the last logits")
def last_logits(model, batch):
    return (model(**without(batch, "labels"), logits_to_keep=3).logits * real(batch)[:, -3:]).exp().mean()


@way("the base model")
def base(model, batch):
    hidden = model.model(**without(batch, "labels")).last_hidden_state
    return (hidden * real(batch)).pow(2).mean((1, 2)).sqrt().sum()


@way("a tuple")
def as_tuple(model, batch):
    loss, logits = model(**batch, return_dict=False)[:2]
    return loss * (logits * real(batch)).pow(2).mean().sqrt()


@way("positions")
def counted(model, batch):
    """Positions as generation makes them of a mask: anything where padding is."""
    mask = real(batch)[..., 0]
    at = batch.get("position_ids", (mask.cumsum(1) - 1).masked_fill(mask == 0, 1))
    return model(**{**batch, "position_ids": at}).loss


@way("slices")
def one_row(model, batch):
    """Slices of rows and tokens, by slices and by numbers."""
    logits = model(**batch).logits
    return logits[1, 13:-22].pow(2).mean() * logits[:, 17, 5:].exp().mean()


@way("hidden states")
def hidden(model, batch):
    """A ratio and a maximum of whole logits, and products of hidden states, of tokens that are no padding."""
    output = model(**batch, output_hidden_states=True)
    logits, *states = (x * real(batch) for x in (output.logits, *output.hidden_states))
    ratio = logits.float().pow(2).mean((1, 2)) / (1 + logits.amax((1, 2)).abs())
    return ratio.sum().sqrt() + sum(torch.einsum("bsd,btd->bst", x, x).mean().tanh() for x in states)


@way("a fused head")
def scored(model, batch):
    """A preference by the log-probabilities of trl's fused head, and the entropy beside them."""
    output = model(**batch, fused_lm_head=True)
    sums = (output.log_probs * output.label_mask).sum(-1)
    return -F.logsigmoid(sums[0] - sums[1]) + 0.1 * output.loss + output.entropy[output.label_mask].mean().detach()


@way("a mask of ones", is_sharded=True)
def with_ones(model, batch):
    return model(**{**batch, "attention_mask": torch.ones_like(batch["input_ids"])}).loss


# beside packs in a row: RoPE that follows the longest position would be another one of each document
WAYS["sharded rows"] = Way(lambda model, batch: whole_outputs(model, None, batch), sharded_outputs, is_sharded=True)
WAYS["a mask of ones"] = Way(WAYS["its loss"].plain, WAYS["a mask of ones"].shared, is_sharded=True)

# --- models


def of(build, *args, **changes):
    """() -> a model, which is the same object for the same arguments."""
    return functools.partial(build, *args, **changes)


def exact(build=small, **changes):
    return build(**changes).double()


def with_fused_head():
    from trl.trainer.utils import add_fused_lm_head

    model = exact()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def adapted(build, *targets, **changes):
    return with_lora(build(), *targets, **changes)


def of_heads(heads, kv_heads, dtype):
    return small(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=8 * heads).to(dtype)


def with_other_norms():
    """Norms of q and k that have forwards of their own, as Liger gives."""
    model = model_of("qwen3", num_hidden_layers=1, layer_types=["full_attention"])
    for norm in (model.model.layers[0].self_attn.q_norm, model.model.layers[0].self_attn.k_norm):
        norm.forward = types.MethodType(type(norm).forward, norm)
    return model


def reentrant(model):
    return checkpointed(model, True)


def checkpointed_in_fp64(model):
    """Backward computes layers again outside of what computes all else in it."""
    contexts = {"context_fn": lambda: (contextlib.nullcontext(), InFP64())}
    model.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
    return model


def adapted_reentrant(model):
    model.enable_input_require_grads()  # torch's reentrant checkpoint has no gradients otherwise
    return checkpointed(model, True)


def seeded_by_rank(model):
    """With weights that another rank does not have, until a wrapper makes them alike."""
    if dist.get_rank():
        model.load_state_dict(small(seed=dist.get_rank()).state_dict())
    return model


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


# --- batches


def ends_in_padding(number):
    """The end of a text is its first padding token: predicted from a real token, it counts as in the plain run."""
    ids, at = collated("odd", number)["input_ids"][:, :SEQ], torch.arange(SEQ)
    ids = torch.cat([ids, ids[:1].flip(1)])
    ends = torch.tensor([[SEQ], [29], [5]])
    return {"input_ids": ids, "attention_mask": (at < ends).long(), "labels": ids.masked_fill(at > ends, IGNORE)}


def unequal(number, seq=SEQ):
    """Rows of other counts of labels. The last rank of two has none."""
    return ragged(MODES["r2"], 1, 1, sequences=2, seq=seq, seed=7 + number)[0]


def short_or_long(number):
    """Of two groups of two micro-batches: the first's are short and the other's long, with "auto" 1 and 3 tiles."""
    return unequal(number, 20 if number < 2 else 140)


def without_a_cache(kind, number):
    return {**collated(kind, number), "use_cache": False}  # with one the plain model does not see documents


# --- the cases


def of_families(cases):
    """As they are, and with all that saves memory."""
    for name, window, kind, section in cases:
        model = of(model_of, name, window)
        tiles = {"mlp_tiles": "auto" if name in EXPERTS else 5, "loss_tiles": 3}
        yield f"{name} {window} {kind} {section}", Case(model, SECTIONS[section], kind, BOTH)
        saving = {**SECTIONS[section], **CHUNKS, **tiles}
        yield f"{name} {window} {kind} {section} saving", Case(model, saving, kind, prepared=checkpointed)


NAMES = sorted(FAMILIES)
WINDOWS = (5, 20)  # a shard has 12 or 13 tokens
# every other family with the same: what differs between families is their attention, and not how a batch is shared
ONCE = [(5, "packed", "u2r2"), (20, "left", "r4"), (20, "packed", "mesh"), (5, "odd", "u4")]
FEW = [(name, *ONCE[number % len(ONCE)]) for number, name in enumerate(NAMES)]
IN_FOUR = ("u2r2", "u4", "r4", "mesh")
PAIRS = [tuple(case.values()) for case in grids.cover(name=NAMES, window=WINDOWS, kind=KINDS, section=IN_FOUR)]


# query and key/value heads: MHA, GQA with fewer kv heads than 4 Ulysses members, MQA, and such that no members divide
ATTENTION = {
    "heads": ((8, 8), (8, 2), (8, 1), (6, 3)),
    "dtype": (torch.float64, torch.bfloat16),
    "section": (("u4", "zigzag"), ("r4", "striped"), ("u2r2", "contiguous")),
}


def of_attention(cases):
    for case in cases:
        name, layout = case["section"]
        section, model = {**SECTIONS[name], "layout": layout}, of(of_heads, *case["heads"], case["dtype"])
        yield str(case), Case(model, section, "odd")


def of_groups(wrappers, more):
    """Of losses that are no sum over tokens, whoever averages the gradients."""
    given = {"batch": unequal, "ways": ["preference and more"], "steps": 2}
    for wrapper in wrappers:
        yield f"two groups, {wrapper} {more}", Case(small, SECTIONS["r2"] | more, **given, wrapper=wrapper)


SOME, ALL = grids.cover(**ATTENTION), grids.whole(**ATTENTION)
OTHERS = {  # on 4 ranks
    **{
        f"a label on the first padding token, {layout}": Case(
            small, {**SECTIONS["u2r2"], "layout": layout}, ends_in_padding, ("its loss, sharded", "a mask of ones")
        )
        for layout in LAYOUTS
    },
    "autocast": Case(llama, SECTIONS["u2r2"], unequal, autocast=True),
    "bf16 in tiles": Case(lambda: llama().bfloat16(), {**SECTIONS["u2r2"], "mlp_tiles": 20, "loss_tiles": 20}, "odd"),
    "autocast in head chunks": Case(of(model_of, "qwen3"), {"size": 1, **CHUNKS}, "odd", autocast=True),
    **{
        f"{target} alone has adapters, in head chunks": Case(
            of(adapted, of(small, num_key_value_heads=4), target), {"size": 1, **CHUNKS}, "odd"
        )
        for target in ("q_proj", "v_proj", "o_proj")
    },
    "norms with forwards of their own": Case(with_other_norms, {"size": 1, **CHUNKS}, "odd"),
    **dict(of_groups(["ZeRO-0", "ZeRO-3", "DDP", "DDP, unused parameters", "FSDP2"], {})),
    **dict(of_groups(["FSDP2", "DDP, static graph"], CHUNKS | {"mlp_tiles": 3})),
}
ROWS = {"section": {"layout": "contiguous"}, "ways": ("sharded rows",)}


EXACT = of(exact)
LOSSES = (
    "divided", "embeddings", "the last logits", "the base model", "a tuple", "positions", "slices", "hidden states"
)  # fmt: skip


def of_calls(name, kinds):
    section = SECTIONS[name]
    yield "by position", Case(EXACT, section, of(without_a_cache, "odd"), ["by position"])
    for kind in kinds:
        batch = of(without_a_cache, kind)
        for each in LOSSES:
            yield f"{each} {kind}", Case(EXACT, section, batch, [each])
        yield f"checkpoints {kind}", Case(EXACT, section, batch, ["preference"], prepared=checkpointed_in_fp64)
        yield f"a fused head {kind}", Case(with_fused_head, section, batch, ["a fused head"], limit=1e-6)
        yield f"adapters {kind}", Case(of(adapted, EXACT, "q_proj", "v_proj"), section, batch, ["its loss"])
        yield f"tiles {kind}", Case(EXACT, section | TWO_TILES, batch, ["its loss"], limit=1e-6)


# those of each function that transformers' files call for a state, and a convolution alone
SEAMS = ("qwen3_next", "bamba", "minimax", "lfm2")
STATES = (
    *SEAMS, "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "falcon_h1",
    "zamba2", "mamba2", "lfm2_moe",
)  # fmt: skip
LATENTS = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "minicpm3", "longcat_flash", "mistral4", "youtu")
NEXT = of(tiny, "qwen3_next")
ADAPTED = of(adapted, NEXT, "in_proj_qkvz", "in_proj_ba", "out_proj")
NEVER = {"prove": "never"}
WITH_A_STATE = {
    "checkpoints": Case(NEXT, NEVER, prepared=checkpointed),
    "reentrant checkpoints": Case(NEXT, NEVER | AGAIN, prepared=reentrant),
    "offloaded checkpoints": Case(NEXT, NEVER | AWAY, prepared=checkpointed),
    "head chunks": Case(NEXT, NEVER | CHUNKS | {"overlap": True}),
    "LoRA": Case(ADAPTED, NEVER),
    "frozen": Case(lambda: frozen(NEXT()), NEVER | {"recurrent_layers": "heads", "ulysses": 2}),
}


def of_types(types, ranks, ulysses, sent, kinds=KINDS, ways=BOTH):
    """In fp64; of packs each document by itself, as plain models leak between documents."""
    setting = "recurrent_layers" if sent in ("states", "heads") else "latent_attention"
    section = {"size": ranks, "ulysses": ulysses, setting: sent, **NEVER}
    for name, kind in itertools.product(types, kinds):
        yield f"{name} {section} {kind}", Case(of(tiny_fp64, name), section, kind, ways)


# under ZeRO, where one of two groups has short sequences; (model, stage, how layers are checkpointed) -> settings
TRAINED = {
    "plain": llama,
    "tied": of(llama, tie_word_embeddings=True),
    "lora": of(adapted, llama, "gate_proj", "down_proj"),  # the first MLP's input wants no gradient
    "lora attention": of(adapted, llama, "q_proj", "v_proj", "o_proj"),
    "lora head": of(adapted, llama, "q_proj", "lm_head"),
}
SAVING = {
    ("tied", 2, None): TILES,
    ("plain", 3, False): AUTO | CHUNKS | AWAY | AGAIN,
    ("lora", 3, None): TILES | CHUNKS,
}
MORE_SAVING = {
    ("plain", 2, None): CHUNKS,
    ("plain", 3, None): AUTO,
    ("plain", 3, True): AUTO | CHUNKS | AWAY,
    ("tied", 2, True): TILES | AGAIN,
    ("tied", 3, False): AUTO | AWAY,
    ("tied", 3, True): TILES,
    ("lora", 2, None): TILES,
    ("lora", 3, False): TILES | CHUNKS | AWAY,
    ("lora", 3, True): AUTO,
    ("lora attention", 2, False): CHUNKS,
    ("lora attention", 3, True): AUTO | CHUNKS,
    ("lora head", 2, False): AUTO,
    ("lora head", 3, None): TILES,
}
PREPARED = {None: lambda model: model, False: checkpointed, True: adapted_reentrant}


def of_saving(cases, size):
    """kernels-community#1000: under ZeRO-3 gradients reduced twice, and ranks with other numbers of tiles hung; #1081:
    parameters marked as ready twice."""
    for (name, stage, checkpoints), more in cases.items():
        given = {"prepared": PREPARED[checkpoints], "wrapper": f"ZeRO-{stage}", "steps": 2}
        yield f"{name} {stage} {checkpoints}", Case(TRAINED[name], {"size": size, **more}, short_or_long, **given)


IN_TWO = {  # on 2 ranks
    **WITH_A_STATE,
    **{f"{name} {kind}": Case(of(with_rope, name), batch=kind, **ROWS) for name in ROPES for kind in ("packed", "odd")},
    **{
        f"weights of {wrapper}": Case(small, {}, unequal, prepared=seeded_by_rank, wrapper=wrapper)
        for wrapper in ("ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "DDP")
    },
    "compiled layers": Case(small, {}, unequal, ["preference and more"], wrapper="compiled layers"),
    # kernels-community#1081: "marked as ready twice"
    "tied embeddings in tiles, DDP": Case(TRAINED["tied"], TILES, unequal, wrapper="DDP", steps=2),
}
COMPILED = {
    **{name: Case(of(tiny, name), {}, wrapper="compiled layers") for name in ("qwen3_next", "falcon_h1")},
    "latents": Case(of(tiny, "minicpm3"), NEVER, unequal, wrapper="compiled"),
    "latents under ZeRO-3": Case(
        of(tiny, "minicpm3"), NEVER | {"latent_attention": "latent"}, unequal, wrapper="ZeRO-3"
    ),
}
GROUPS = {  # name -> (ranks, cases)
    **{f"families {start}": (4, of_families(FEW[start : start + 5])) for start in (0, 5, 10)},
    "attention": (4, of_attention(SOME)),
    "in four": (4, OTHERS.items()),
    "in two": (2, IN_TWO.items()),
    "ways r2": (2, of_calls("r2", ["packed"])),
    "ways u2r2": (4, of_calls("u2r2", ["left"])),
    "states": (2, of_types(SEAMS, 2, 1, "states", ("left", "packed"), ["whole"])),
    "states by heads": (4, of_types(SEAMS, 4, 2, "heads", ("left", "packed"), ["whole"])),
    "latents": (2, of_types(LATENTS[:1], 2, 1, "latent")),
    "latents of two Ulysses ranks": (4, of_types(LATENTS[:1], 4, 2, "latent", ("left", "packed"), ["whole"])),
    "saving": (2, of_saving(SAVING, 1)),
}
SLOW = {
    **{f"families {at}": (4, of_families(x for x in PAIRS if x[0] in NAMES[at : at + 5])) for at in (0, 5, 10)},
    "attention": (4, of_attention(case for case in ALL if case not in SOME)),
    **{f"ways {name}": (SECTIONS[name]["size"], of_calls(name, KINDS)) for name in ("r2", "u2", "u2r2", "r4", "u4")},
    **{
        f"{types[0]} {way}": (way[0], of_types(types, *way))
        for types in (STATES[:7], STATES[7:])
        for way in ((2, 1, "states"), (4, 2, "heads"), (2, 2, "heads"), (4, 2, "states"))
    },
    **{
        f"latents {way}": (way[0], of_types(LATENTS, *way))
        for way in ((2, 1, "latent"), (2, 2, "expanded"), (4, 2, "latent"), (4, 2, "expanded"), (4, 4, "latent"))
    },
    **{
        f"{types} {way}": (way[0], of_types(types, *way, ("left", "packed"), ["sharded"]))
        for types, way in (
            (SEAMS, (4, 4, "heads")),
            (SEAMS, (8, 2, "heads")),
            (SEAMS, (8, 1, "states")),
            (LATENTS[:2], (8, 2, "latent")),
            (LATENTS[:1], (8, 8, "latent")),
        )
    },
    "saving": (4, of_saving(MORE_SAVING, 2)),
    "compiled": (2, COMPILED.items()),
    "ZeRO": (4, of_groups(["ZeRO-1", "ZeRO-2", "ZeRO-3_all_reduce"], {})),
}


GROUPS, SLOW = ({name: (ranks, dict(its)) for name, (ranks, its) in groups.items()} for groups in (GROUPS, SLOW))


def given(groups):
    return [(ranks, name) for name, (ranks, _) in groups.items()]


# axolotl#3608, TransformerEngine#1930, verl#6475: packed documents attended to one another, or labels leaked.
# accelerate#4177, prime-rl PR 2828: windows were dropped; N keys were counted as N + 1. deepspeed#7384, #7842: silently
# wrong attention. verl#850, prime-rl#3042: fewer kv heads than ranks. ring-flash-attention#42, #67: block outputs in
# bf16 add up. TransformerEngine#3331, #1930: tail padding drops real keys
@pytest.mark.parametrize(("ranks", "group"), given(GROUPS))
@on_each_of("ranks", timeout=300, keep="deepspeed")
def test_models_that_share_sequences_are_the_plain_ones(ranks, group):
    assert_cases(GROUPS[group][1])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "group"), given(SLOW))
@on_each_of("ranks", timeout=900, keep="deepspeed")
def test_more_of_them(ranks, group):
    assert_cases(SLOW[group][1])


def test_every_family_is_tried():
    assert sorted(TESTED) == NAMES


@on_each_of(2)
def test_scaled_ropes_depend_on_the_length_and_are_given_back():
    """A rank that looked at its own positions alone would take them for a short sequence's."""
    sp, ids = make(layout="contiguous"), collated("odd")["input_ids"]
    for name in ROPES:
        model, shared = with_rope(name), with_rope(name).patch_attention(sp)
        short, long = (model(ids[:, :tokens]).logits for tokens in (20, 51))
        assert (oracle.error(short, long[:, :20]) > 1e-3) is (name != "yarn"), name
        shared(**sp.shard_batch(collated("odd")))
        assert oracle.error(shared.unpatch_attention()(ids).logits, long) < 1e-5, name
