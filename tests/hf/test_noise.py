"""Dropout and NEFTune draw by sample and global token: a run at any degree is the run of one rank a sequence."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.neftune import neftune_post_forward_hook

from ds_seqpar.compiler.sharding.masks import Mask
from hf_integration import dropout, patch_attention, patched_with, unpatch_attention, whole_sequences
from tests.dist.ranks import is_one_sentence, make, refusal
from tests.hf import families, trainers
from tests.hf.every_type import tiny
from tests.hf.llama import IGNORE, array, gap, small, with_lora
from tests.hf.trainers import documents, trained
from tests.launch import on_trainer_ranks, on_warm_ranks
from tests.words import missing

SEQ, DROPPED, ALPHA = 50, 0.3, 5.0
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]


def dropping(*targets, model=None, **changes):
    """A model with adapters that drop their inputs; by default a small one with many."""
    return with_lora(model or small(), *(targets or TARGETS), lora_dropout=DROPPED, **changes)


def with_neftune(model):
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = ALPHA
    embeddings.register_forward_hook(neftune_post_forward_hook)
    return model


def batch(kind, rows=2):
    ids = torch.randint(0, 64, (rows, SEQ), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, :13] = 0
        given["labels"][1, :14] = IGNORE
    if kind == "packed":
        lengths = (30, SEQ * rows - 30)
        given = {name: x.view(1, -1) for name, x in given.items()}
        given["labels"][0, Mask.documents_of(lengths)] = IGNORE
        given["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    return given


LORA = {"model": lambda: with_neftune(dropping())}
# what is trained -> model, kind of batch, how layers are checkpointed, sections besides size
CASES = {
    "phi3's own": {
        "model": lambda: families.model_of("phi3", resid_pdrop=DROPPED, attn_implementation="sdpa"),
        "kind": "plain",
    },
    "reentrant": {**LORA, "kind": "plain", "reentrant": True, "ulysses": 2},
    "tiles": {**LORA, "kind": "padded", "reentrant": False, "mlp_tiles": 3, "loss_tiles": 2},
    "packed": {**LORA, "kind": "packed"},
}


def gradients(name, size):
    """Of two forwards before a backward, in fp64: (losses, gradients of this rank)."""
    given = dict(CASES[name])
    model, kind, reentrant = given.pop("model")().double().train(), given.pop("kind"), given.pop("reentrant", None)
    sp = make(**({"size": size, **given} if size > 1 else {"size": 1}))
    model.patch_attention(sp)
    if reentrant is not None and size > 1:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(4)
    whole = {**batch(kind), "use_cache": False}  # with a cache one rank would let documents see one another
    losses = [model(**whole).loss for _ in range(2)]
    sum(losses).backward()
    found = {name: array(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses], found, sp.data_rank


def at_sizes(names, sizes):
    return {(name, size): gradients(name, size) for name in names for size in sizes}


@pytest.mark.parametrize(
    ("names", "size"),
    [
        (["reentrant", "packed"], 2),
        (["tiles", "phi3's own"], 4),
        *(pytest.param(list(CASES), size, marks=pytest.mark.whole) for size in (2, 4)),
    ],
)
def test_losses_and_gradients_are_those_of_one_rank_a_sequence(names, size):
    """Each group trains on the same batch, with its own noise."""
    found = on_warm_ranks(4, at_sizes, names, (1, size), timeout=200)
    for name in names:
        plain = [ranks[name, 1] for ranks in found]
        assert len({tuple(losses) for losses, _, _ in plain}) == 4
        for losses, _, _ in plain:
            assert losses[0] != pytest.approx(losses[1], rel=1e-5)
        for group in range(4 // size):
            members = [ranks[name, size] for ranks in found if ranks[name, size][2] == group]
            mean = {n: sum(grads[n] for _, grads, _ in members) / size for n in members[0][1]}
            assert gap(mean, plain[group][1]) < 1e-10, name
            for losses, _, _ in members:
                assert losses == pytest.approx(plain[group][0], rel=1e-6), name


# --- the numbers themselves


def masks(steps):
    """Of each step and dropout what it kept (1 or 0), in one list; what it made of what it kept."""
    model = dropping(*TARGETS[:4]).train()
    model.patch_attention(make(size=1))
    kept, scales = [], set()

    def look(module, args, output):
        (x,) = args
        kept.append((output != 0).float())
        scales.update((output / x)[output != 0].double().round(decimals=5).unique().tolist())

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(look)
    torch.manual_seed(4)
    for _ in range(steps):
        model(**batch("plain", rows=4))
    return kept, scales


def test_dropout_keeps_as_much_as_it_should_and_nothing_hangs_together():
    """Between groups, steps, layers, rows, tokens and channels."""
    (kept, scales), (others, _) = on_warm_ranks(2, masks, 3)
    assert scales == {round(2**16 / (2**16 - round(DROPPED * 2**16)), 5)}
    found = [x - (1 - DROPPED) for x in (*kept, *others)]
    assert len(found) == 2 * 3 * 4
    deviation = (DROPPED * (1 - DROPPED)) ** 0.5

    def assert_near_zero(x, deviation):
        assert abs(float(x.double().mean())) < 4.5 * deviation / x.numel() ** 0.5

    for x in found:
        assert_near_zero(x, deviation)
        pairs = [x[:, a:] * x[:, : SEQ - a] for a in (1, 2, 7)] + [x[..., a:] * x[..., :-a] for a in (1, 2, 3, 4, 8)]
        for pair in (*pairs, x[0] * x[1], x[2] * x[3], x[:, 1:, 1:] * x[:, :-1, :-1]):
            assert_near_zero(pair, deviation**2)
    for a in range(len(found)):
        for b in range(a):
            if found[a].shape == found[b].shape:
                assert_near_zero(found[a] * found[b], deviation**2)


def counters():
    """The counters of two forwards of a layout, whether they are one tensor, and those of fewer rows."""
    sp, tokens = make(size=1), torch.empty(2, SEQ)
    first, second, fewer = (
        dropout.noise_of(sp, seed, x, None, False) for seed, x in ((5, tokens), (6, tokens), (5, tokens[:1]))
    )
    return first.tokens.tolist(), first.tokens is second.tokens, fewer.tokens.tolist()


def test_a_layouts_counters_are_made_once():
    """So a forward copies none to its device."""
    for rank, (found, alike, fewer) in enumerate(on_warm_ranks(2, counters)):
        assert found == [[(2 * rank + row) * dropout.SAMPLE + at for at in range(SEQ)] for row in range(2)]
        assert fewer == [[rank * dropout.SAMPLE + at for at in range(SEQ)]]
        assert alike


def test_numbers_are_split_mix_and_uniform():
    """Against the first numbers that its reference implementation gives for this seed."""
    found = dropout.split_mix(torch.arange(1, 4), 1234567)
    assert [x % 2**64 for x in found.tolist()] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    numbers = dropout.split_mix(torch.arange(2**16), 5).view(torch.int16)
    counts = torch.histc(numbers.float(), 64, -(2.0**15), 2.0**15)
    expected = numbers.numel() / 64
    assert float((counts - expected).square().sum() / expected) < 125  # of 63 degrees of freedom: 1e-5
    assert [counts.min() > 0, numbers.min() < -32700, numbers.max() > 32700] == [True] * 3


def neftune(size):
    """(this rank's rows and tokens of what NEFTune adds, their mean over ranks of a group): of whole embeddings."""
    model, sp = with_neftune(small()).train(), make(size=size)
    model.patch_attention(sp)
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    torch.manual_seed(4)
    whole = batch("plain")
    ids = whole["input_ids"]
    model(**whole)
    plain = nn.functional.embedding(ids, model.get_input_embeddings().weight.detach())
    return sp.gather(seen[0], 1, sp.place(SEQ)) - plain


def test_neftune_adds_what_it_adds_to_the_whole():
    one, two = on_warm_ranks(1, neftune, 1)[0], on_warm_ranks(2, neftune, 2)[0]
    assert torch.equal(one, two)
    size = ALPHA / (SEQ * 64) ** 0.5
    assert 0.99 * size < float(one.abs().max()) <= size * (1 + 1e-4)
    assert abs(float(one.mean())) < 4.5 * size / (3 * one.numel()) ** 0.5
    assert float(one.std()) == pytest.approx(size / 3**0.5, rel=0.03)


# --- what is left alone, and what is refused


def others():
    sp, found = make(size=2), {}
    model = with_neftune(dropping()).train()
    model.patch_attention(sp)
    whole = batch("plain")
    found["copies"] = [float(copied(**whole).loss) for copied in (model, copy.deepcopy(model)) if torch.manual_seed(4)]
    before = torch.get_rng_state()
    with torch.no_grad():
        found["evaluated"] = [float(model.eval()(**whole).loss) for _ in range(2)]
    found["untouched"] = torch.equal(before, torch.get_rng_state())
    torch.manual_seed(4)
    with whole_sequences(model.train()):
        found["own"] = float(model(**whole).loss)
    unpatch_attention(model)
    torch.manual_seed(4)
    found["unpatched"] = float(model(**whole).loss)
    found["kinds"] = {type(m) for m in model.modules() if isinstance(m, nn.Dropout)}
    found["hooks"] = list(model.get_input_embeddings()._forward_hooks.values())
    return found


def test_only_training_forwards_of_the_patched_model_draw_so():
    for found in on_warm_ranks(2, others):
        assert found["copies"][0] == found["copies"][1]
        assert found["evaluated"][0] == found["evaluated"][1]
        assert found["untouched"]
        assert found["own"] == pytest.approx(found["unpatched"], rel=1e-6)
        assert found["kinds"] == {nn.Dropout}
        assert found["hooks"] == [neftune_post_forward_hook]


def by_own_checkpoint(model):
    layer = model.base_model.model.model.layers[0]
    own = layer.forward
    layer.forward = lambda x, **kwargs: checkpoint(lambda x: own(x, **kwargs), x, use_reentrant=False)
    model(**batch("plain")).loss.backward()


def dropouts(model):
    """Those of a layer's up_proj, by adapter."""
    return model.base_model.model.model.layers[0].mlp.up_proj.lora_dropout


def of_another_kind(model):
    dropouts(model)["default"] = nn.FeatureAlphaDropout(0.1)
    model(**batch("plain"))


def of_another_p_on_one_rank(model):
    dropouts(model)["default"].p = 0.1 + 0.2 * dist.get_rank()
    model(**batch("plain"))


def by_some_tokens(model):
    its = dropouts(model)["default"]
    model.base_model.model.model.layers[0].register_forward_hook(lambda *_: its(torch.ones(2, 3, 64)) and None)
    model(**batch("plain"))


def compiled(model):
    torch.compile(model, backend="eager")(**batch("plain")).loss.backward()


def of_routers(model):
    routed = tiny("mixtral")
    for layer in routed.model.layers:
        layer.mlp.jitter_noise = 0.1
    patch_attention(routed, patched_with(model))
    with torch.no_grad():
        routed.eval()(**batch("plain"))
    routed.train()(**batch("plain"))


REFUSED = {
    by_own_checkpoint: ["needs the checkpoints of transformers", "gradient_checkpointing_enable"],
    of_another_kind: ["type nn.Dropout", "got a FeatureAlphaDropout with p 0.1"],
    of_another_p_on_one_rank: ["the same", "rank 0: dropout '1 of Dropout p 0.3, 1 of Dropout p 0.1'; rank 1"],
    by_some_tokens: ["all of a rank's tokens, (2, 25)", "got (2, 3, 64)"],
    of_routers: [
        "noise of nn.Dropout and NEFTune",
        "a MixtralSparseMoeBlock with jitter_noise 0.1",
        "before the model",
    ],
    compiled: ["a model that is not compiled", "got a compiled one"],
}


def refused():
    sp, found = make(size=2, prove="never"), {}
    for call in REFUSED:
        model = dropping("q_proj", "up_proj").train()
        model.patch_attention(sp)
        model(**batch("plain"))
        found[call.__name__] = refusal(call, model)
    return found


def test_what_cannot_draw_by_token_says_so():
    for found in on_warm_ranks(2, refused, timeout=200):
        for call, words in REFUSED.items():
            kind, sentence = found[call.__name__]
            assert kind in ("ConfigError", "InputError", "DisagreementError"), call
            assert is_one_sentence(sentence)
            assert missing(sentence, *words) == [], sentence


# --- the Trainer


def run(folder, size, noisy, resume):
    """Of as many groups as there are, of as many sequences each."""
    model = dropping(model=small(pad_token_id=0), init_lora_weights=True) if noisy == "lora" else small(pad_token_id=0)
    data = documents(48)
    if noisy != "lora":  # its size hangs on a batch's length
        data = [{name: x.repeat(4)[:30] for name, x in example.items()} for example in data]
    changes = {"neftune_noise_alpha": ALPHA} if noisy != "lora" else {}
    changes |= {"save_strategy": "steps", "save_steps": 1} if resume else {}
    given = {"model": model, "parts": {"train_dataset": data}, "max_steps": 2, **changes}
    logs = trained(trainers.make(folder, size, {"size": size}, **given)).logs
    if resume:
        given["model"] = dropping(model=small(pad_token_id=0), init_lora_weights=True)
        trainer = trainers.make(folder, size, {"size": size}, **given)
        logs["resumed"] = trained(trainer, resume_from_checkpoint=f"{folder}/checkpoint-1").logs["loss"]
    return logs


def runs(folder, sizes):
    return {
        (size, noisy): run(f"{folder}/{size}{noisy}", size, noisy, resume=(size, noisy) == (2, "lora"))
        for noisy in ("lora", "neftune")
        for size in sizes
    }


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((1, 2, 4), marks=pytest.mark.whole)], ids=str)
def test_the_trainer_gives_the_same_numbers_at_any_size(sizes, tmp_path):
    for found in on_trainer_ranks(max(sizes), runs, tmp_path, sizes, timeout=300):
        for noisy in ("lora", "neftune"):
            for size in sizes[1:]:
                for name in ("loss", "grad_norm"):
                    assert found[size, noisy][name] == pytest.approx(found[1, noisy][name], rel=1e-6), (size, name)
        assert found[2, "lora"]["resumed"] == pytest.approx(found[2, "lora"]["loss"], rel=1e-6)
