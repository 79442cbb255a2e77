"""Noise in two streams: a rank draws its own for its tokens, and the ranks of a sequence the same for whole tensors."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForTokenClassification
from transformers.integrations.neftune import neftune_post_forward_hook

from hf_integration import patch_attention, unpatch_attention, whole_sequences
from tests.dist.ranks import lacking, make, refusal
from tests.hf import families, trainers
from tests.hf.every_type import tiny
from tests.hf.llama import averaged, gap, small, with_lora
from tests.hf.trainers import documents, trained
from tests.launch import on_each_of, on_trainer_ranks

SEQ, DROPPED, ALPHA = 48, 0.3, 5.0
STEP = 1e-2  # of all weights together: small beside them, large beside fp32's rounding
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]


def dropping(*targets, model=None, **changes):
    """A model with adapters that drop their inputs; by default a small one with many."""
    return with_lora(model or small(), *(targets or TARGETS), lora_dropout=DROPPED, **changes).train()


def with_neftune(model):
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = ALPHA
    embeddings.register_forward_hook(neftune_post_forward_hook)
    return model


def batch(rows=2):
    ids = torch.randint(0, 64, (rows, SEQ), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def states():
    """The state of the shared stream, of this rank and of the first."""
    mine = torch.get_rng_state()
    first = mine.clone()
    dist.broadcast(first, 0)
    return mine, first


@contextlib.contextmanager
def seen(model, kind=nn.Dropout):
    """module -> what it made of what it got, and that, while a model runs."""
    found = {}
    modules = [module for module in model.modules() if isinstance(module, kind)]
    hooks = [m.register_forward_hook(lambda m, args, out: found.update({m: (out.detach(), args[0])})) for m in modules]
    yield found
    for hook in hooks:
        hook.remove()


def step(model, **given):
    """(loss, averaged gradients) from the same seed. Norms and the loss are in fp32 whatever the weights are in."""
    model.zero_grad()
    torch.manual_seed(4)
    loss = model(**(given or batch())).loss
    loss.backward()
    return float(loss), averaged(model)


# --- a rank's own


@on_each_of(2)
def test_losses_and_gradients_are_those_of_a_model_with_the_numbers_that_ranks_drew():
    model, sp = dropping().double(), make(size=2)
    plain = copy.deepcopy(model)
    model.patch_attention(sp)
    with seen(model) as found:
        loss, gradients = step(model)
    twins, kept = dict(plain.named_modules()), []
    for name, module in model.named_modules():
        if module in found:
            out, x = found[module]
            factor = (out != 0) / (1 - DROPPED)
            torch.testing.assert_close(out, x * factor)
            kept.append(factor.clone())
            factor = sp.gather(factor, 1, sp.place(SEQ))
            twins[name].forward = lambda x, factor=factor: x * factor
    assert len(kept) == len(TARGETS)
    expected, plain_gradients = step(plain)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert gap(gradients, plain_gradients) < 1e-5
    step(model)
    with seen(model) as found:  # the next forward, the modules and the ranks draw other numbers
        model(**batch())
    kept += [(out != 0) / (1 - DROPPED) for out, _ in found.values()]
    kept = [x[..., :64].flatten() for x in kept]
    both = [[torch.empty_like(x) for _ in range(2)] for x in kept]
    for x, of_ranks in zip(kept, both, strict=True):
        dist.all_gather(of_ranks, x)
    all_kept = [x for of_ranks in both for x in of_ranks]
    deviation = (DROPPED / (1 - DROPPED)) ** 0.5
    for a, x in enumerate(all_kept):
        assert abs(float(x.mean()) - 1) < 4.5 * deviation / len(x) ** 0.5
        for other in all_kept[:a]:
            assert abs(float(((x - 1) * (other - 1)).mean())) < 4.5 * deviation**2 / len(x) ** 0.5
    assert torch.equal(*states())


def by_own_checkpoint(model):
    layer = model.base_model.model.model.layers[0]
    own = layer.forward
    layer.forward = lambda x, **kwargs: checkpoint(lambda x: own(x, **kwargs), x, use_reentrant=False)


def by_library(model, reentrant):
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


CHECKPOINTS = {
    "reentrant": lambda model: by_library(model, True),
    "not reentrant": lambda model: by_library(model, False),
    "a user's own": by_own_checkpoint,
}


@on_each_of(2)
@pytest.mark.parametrize("settings", [{}, {"mlp_tiles": 3, "loss_tiles": 2}, {"head_chunks": 2}], ids=str)
def test_checkpoints_draw_what_forward_drew(settings):
    found = []
    for checkpoints in (None, *CHECKPOINTS.values()):
        model = dropping("up_proj", "o_proj", "lm_head").double()
        patch_attention(with_neftune(model), make(size=2, prove="never", **settings))
        if checkpoints is not None:
            checkpoints(model)
        found.append(step(model))
    (loss, gradients), *others = found
    for other_loss, other_gradients in others:
        assert other_loss == pytest.approx(loss, rel=1e-12)
        assert gap(other_gradients, gradients) < 1e-10
    losses, slope = [], float(sum((x**2).sum() for x in gradients.values())) ** 0.5  # along the gradient
    parameters = dict(model.named_parameters())
    for size in (STEP, -2 * STEP):
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameters[name] += size / slope * torch.from_numpy(gradient)
        losses.append(step(model)[0])
    assert (losses[0] - losses[1]) / (2 * STEP) == pytest.approx(slope, rel=5e-3)


@on_each_of(2)
def test_neftune_has_the_size_of_whole_sequences():
    model, sp = with_neftune(small()).train(), make(size=2)
    model.patch_attention(sp)
    outputs = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    model(**batch())
    plain = F.embedding(batch()["input_ids"], model.get_input_embeddings().weight.detach())
    added = sp.gather(outputs[0], 1, sp.place(SEQ)) - plain
    size = ALPHA / (SEQ * 64) ** 0.5
    assert 0.99 * size < float(added.abs().max()) <= size * (1 + 1e-4)
    assert abs(float(added.mean())) < 4.5 * size / (3 * added.numel()) ** 0.5
    assert float(added.std()) == pytest.approx(size / 3**0.5, rel=0.03)
    first, second = (sp.shard(added, 1) if sp.rank == rank else torch.zeros_like(outputs[0]) for rank in range(2))
    for x in (first, second):
        dist.all_reduce(x)
    assert not torch.allclose(first, second, atol=size / 10)
    assert model.get_input_embeddings().neftune_noise_alpha == ALPHA


@on_each_of(2)
def test_noise_that_is_no_modules_is_drawn_by_ranks_too():
    """Of a router, in the layers' own forwards."""
    routed = patch_attention(tiny("mixtral"), make(size=2, prove="never")).train()
    before = torch.get_rng_state()
    plain = routed(**batch()).loss
    assert torch.equal(before, torch.get_rng_state())
    for layer in routed.model.layers:
        layer.mlp.jitter_noise = 0.5
    losses = [float(routed(**batch()).loss.detach()) for _ in range(2)]
    assert len({float(plain.detach()), *losses}) == 3
    assert torch.equal(*states())


# --- what all ranks draw


class Jumpy(LlamaForTokenClassification):
    """One that draws for whole tensors, before its own dropout."""

    def forward(self, input_ids, labels, **kwargs):
        hidden = self.model(input_ids, **kwargs)[0]
        logits = self.score(self.dropout(hidden)).whole()
        return {"loss": F.cross_entropy(F.dropout(logits, 0.5).flatten(0, 1), labels.flatten()), "logits": logits}


@on_each_of(2)
def test_noise_of_whole_tensors_is_the_same_on_all_ranks():
    config = small().config
    config.num_labels, config.classifier_dropout, config.pad_token_id = 3, 0.5, 0
    torch.manual_seed(0)
    model, given = Jumpy(config).train(), batch()
    patch_attention(model, make(size=2, prove="never"))
    given["labels"] = given["labels"] % 3
    for _ in range(2):
        with seen(model) as found:
            loss = model(**given)["loss"].detach()
        (own, _) = found[model.dropout]
        for x, equal in ((loss, True), ((own.local != 0).float() if hasattr(own, "local") else own, False)):
            first = x.clone()
            dist.broadcast(first, 0)
            assert dist.get_rank() == 0 or torch.equal(first, x) == equal
        assert torch.equal(*states())
    torch.manual_seed(dist.get_rank())
    model(**given)
    words = ("the same", "random numbers", "torch.manual_seed with one seed on all ranks of a sequence")
    assert lacking(refusal(model, **given), "DisagreementError", *words) == []


# --- what is left alone, and what is refused


@on_each_of(2)
def test_nothing_is_drawn_in_evaluation_and_without_noise():
    sp, model = make(size=2), with_neftune(dropping())
    patch_attention(model, sp)
    before = torch.get_rng_state()
    with torch.no_grad():
        assert len({float(model.eval()(**batch()).loss) for _ in range(2)}) == 1
    quiet = patch_attention(small().train(), sp)
    before_quiet = torch.get_rng_state()
    quiet(**batch()).loss.backward()
    assert torch.equal(before_quiet, torch.get_rng_state())
    torch.set_rng_state(before)
    model.train()
    torch.manual_seed(4)
    with whole_sequences(model):
        own = float(model(**batch()).loss)
    unpatch_attention(model)
    torch.manual_seed(4)
    assert own == pytest.approx(float(model(**batch()).loss), rel=1e-6)


@on_each_of(1)
@pytest.mark.parametrize("sharded", [False, True])
def test_one_rank_draws_what_a_plain_model_draws(sharded):
    for model in (dropping().double(), families.model_of("phi3", resid_pdrop=DROPPED).double().train()):
        plain, sp = copy.deepcopy(with_neftune(model)), make(size=1)
        patch_attention(model, sp)
        given = sp.shard_batch(batch()) if sharded else {}
        (expected, gradients), (loss, found) = step(plain), step(model, **given)
        assert loss == pytest.approx(expected, rel=1e-6)
        assert gap(found, gradients) < 1e-5


def compiled(sp):
    model = patch_attention(dropping("q_proj"), sp)
    torch.compile(model, backend="eager")(**sp.shard_batch(batch())).loss.backward()


def of_other_numbers(sp):
    model = dropping("q_proj")
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_dropout["default"].p = 0.1 + 0.2 * sp.rank
    patch_attention(model, sp)(**batch())


def layers_by_chance(sp):
    model = tiny("opt")
    model.model.decoder.layerdrop = 0.1
    patch_attention(model, sp)
    with torch.no_grad():
        model.eval()(**batch())
    model.train()(**batch())


REFUSED = {
    compiled: ("ConfigError", "a model that is not compiled", "got a compiled one with Dropout p 0.3"),
    of_other_numbers: ("DisagreementError", "rank 0: noise '1 of Dropout p 0.1'; rank 1: noise"),
    layers_by_chance: ("ConfigError", "needs all layers in each forward", "set layerdrop to 0"),
}


@on_each_of(2)
def test_what_ranks_cannot_draw_for_themselves_is_refused():
    for call, words in REFUSED.items():
        assert lacking(refusal(call, make(size=2, prove="never")), *words) == []


# --- the Trainer


def run(folder, size, resume):
    """Of as many groups as there are, of as many sequences each."""
    made = {"model": dropping(model=small(pad_token_id=0), init_lora_weights=True)}
    given = {"parts": {"train_dataset": documents(48)}, "max_steps": 2, "neftune_noise_alpha": ALPHA}
    given |= {"save_strategy": "steps", "save_steps": 1}
    logs = [trained(trainers.make(folder, size, {"size": size}, **given, **made)).logs]
    made = {"model": dropping(model=small(pad_token_id=0), init_lora_weights=True)}
    trainer = trainers.make(folder, size, {"size": size}, **given, **made)
    logs.append(trained(trainer, resume_from_checkpoint=f"{folder}/checkpoint-1").logs)
    return logs


@pytest.mark.usefixtures("compiled")
def test_a_resumed_trainer_draws_what_it_would_have_drawn(tmp_path):
    for straight, resumed in on_trainer_ranks(2, run, tmp_path, 2, True, timeout=300):
        for name in ("loss", "grad_norm"):
            assert resumed[name] == straight[name]
