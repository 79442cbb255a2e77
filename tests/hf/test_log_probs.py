"""Numbers a token of a patched model, by trl's head and by `sp.log_probs`: the plain model's, without its logits."""

import re
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

import ds_seqpar
from ds_seqpar.whole import WholeTensor
from hf_integration import share_accelerator, share_sequences, whole_sequences
from tests import grids, scripts
from tests.dist.ranks import lacking, refusal
from tests.hf.families import model_of
from tests.hf.llama import IGNORE, array, averaged, gap, settings, small, with_lora
from tests.launch import on_each_of
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
ROOT = Path(__file__).parents[2]
ROWS, TOKENS, HEAT = 2, 51, 0.7
FAMILIES = {
    "llama": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1, "use_sliding_window": False, "layer_types": ["full_attention"]},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gpt_oss": {},
}
# padding -> (tokens before, after) each row's own
PADDINGS = {
    "none": [(0, 0), (0, 0)],
    "left": [(0, 0), (13, 0)],
    "right": [(0, 22), (0, 0)],
    "both": [(7, 9), (3, 0)],
    "ragged": [(0, 1), (0, 30)],
}
AXES = {"size": (1, 2, 4), "stage": ("0", "2", "3"), "family": tuple(FAMILIES), "padding": tuple(PADDINGS)}
ENGINE = ("size", "stage", "family")  # cases that have these in common share an engine


def model_for(family, **changes):
    return model_of(family, **{**FAMILIES.get(family, {}), **changes})


def with_trls_head(family, **changes):
    from trl.trainer.utils import add_fused_lm_head

    model = model_for(family, **changes)
    add_fused_lm_head(model, HEAT, outputs=("log_probs", "entropy"))
    return model


def batch_of(padding, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids, mask = torch.randint(3, 64, (ROWS, TOKENS), generator=draw), torch.ones(ROWS, TOKENS, dtype=torch.int64)
    labels = ids.clone()
    for row, (before, after) in enumerate(PADDINGS[padding]):
        mask[row, :before] = mask[row, TOKENS - after :] = 0
        labels[row, : before + (9 if padding == "ragged" else 1)] = IGNORE
    labels[mask == 0] = IGNORE
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def by_logits(model, input_ids, attention_mask, labels):
    """(log-probabilities, entropies) from the logits of a plain model."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    labels, likely = labels[:, 1:], (logits.float() / HEAT).log_softmax(-1)
    chosen = likely.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
    return [x.masked_fill(labels == IGNORE, 0) for x in (chosen, -(likely.exp() * likely).sum(-1))]


def by_trl(sp, model, **batch):
    output = model(**batch, fused_lm_head=True)
    return output.log_probs, output.entropy


def by_us(sp, model, **batch):
    return sp.log_probs(model, **batch, temperature=HEAT, return_entropy=True)


WAYS = (by_trl, by_us)


def loss_of(numbers):
    """That weighs each number of its own, so that each has a gradient of its own."""
    draw = torch.Generator().manual_seed(9)
    return sum((x * torch.randn(x.shape, generator=draw)).sum() for x in numbers)


def plain(model, batch):
    """(numbers, gradients by name averaged over ranks) of the plain model."""
    model.zero_grad()
    numbers = by_logits(model, **batch)
    loss_of(numbers).backward()
    return [x.detach() for x in numbers], averaged(model)


def check(found, expected, case):
    for number, wanted in zip(found, expected, strict=True):
        assert number.dtype == wanted.dtype, case
        assert (number - wanted).abs().max() <= 1e-5 * wanted.abs().max(), case


def on_engines(size, stage, family, paddings):
    """On a rank: an engine's numbers and gradients are the plain model's, for each padding and way."""
    section = {"size": size, "ulysses": min(size, 2)}
    config = settings(section, stage, 1, ROWS, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    engine, *_ = ds_seqpar.initialize(model=with_trls_head(family), config=config)
    sp, alone = engine.sequence_parallel, model_for(family)
    for padding in paddings:
        batch = batch_of(padding)
        expected, gradients = plain(alone, batch)
        for way in WAYS:
            case, numbers = (padding, way.__name__), way(sp, engine, **batch)
            engine.backward(loss_of(numbers))
            check([x.detach() for x in numbers], expected, case)
            named = engine.module.named_parameters()
            full = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in named}
            its = {name: array(full[name]) for name in gradients}
            assert gap(its, gradients) < 1e-5, (case, gap(its, gradients))
            engine.step()  # by a rate of 0


def grouped():
    """pytest parameters: of each size [(size, stage, family, paddings)], of a cover, and marked `slow` of the rest."""
    engines = grids.cover(**{axis: AXES[axis] for axis in ENGINE})
    engines = [case for case in engines if case["size"] < 4 or case["family"] in ("llama", "gemma2")]
    few = grids.cover(lambda case: {axis: case[axis] for axis in ENGINE} in engines, **AXES)
    for cases, marks in ((few, ()), ([case for case in grids.whole(**AXES) if case not in few], pytest.mark.slow)):
        groups = {}
        for case in cases:
            groups.setdefault(tuple(case[axis] for axis in ENGINE), []).append(case["padding"])
        for size in AXES["size"]:
            members = [(*key, paddings) for key, paddings in groups.items() if key[0] == size]
            yield pytest.param(members, id=f"{'rest' if marks else 'few'} {size}", marks=marks)


@pytest.mark.parametrize("cases", [*grouped()])
def test_an_engines_numbers_and_gradients_are_the_plain_models(cases):
    on_ranks(cases[0][0], engines, cases, timeout=300)


def engines(cases):
    for case in cases:
        on_engines(*case)


# --- whoever stands around the model, and whatever makes it other than plain


def adapted(*targets):
    return with_lora(model_for("llama"), "q_proj", *targets)


def as_it_is(model):
    return model


def in_fsdp(model):
    return fully_shard([fully_shard(layer) for layer in model.model.layers] and model)


def with_compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def in_ddp(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


# name -> (family and what changes in it, settings of the SequenceParallel, what is called of the patched model)
WRAPPERS = {
    "DDP": (("llama", {}), {}, DistributedDataParallel),
    "DDP, LoRA on the head": (("llama", {}), {}, in_ddp),
    "FSDP2": (("llama", {}), {}, in_fsdp),
    "tied, in loss tiles": (("llama", {"tie_word_embeddings": True}), {"loss_tiles": 3}, as_it_is),
    "head chunks, tiled MLPs": (("qwen3", {}), {"head_chunks": 2, "mlp_tiles": 3}, as_it_is),
    "scaled logits": (("cohere2", {}), {"ulysses": 1}, as_it_is),
    "divided logits": (("granite", {}), {"ulysses": 1}, as_it_is),
    "compiled": (("llama", {}), {}, with_compiled_layers),
    "checkpoints": (("qwen3", {}), {}, as_it_is),
}
FEW = ["DDP, LoRA on the head", "FSDP2", "tied, in loss tiles", "scaled logits"]


@pytest.mark.parametrize("names", grids.few_then_rest(FEW, [name for name in WRAPPERS if name not in FEW]))
@on_each_of(2, keep="deepspeed")
def test_wrappers_and_settings_change_nothing(names):
    for name in names:
        (family, changes), section, wrap = WRAPPERS[name]
        alone, model = (model_for(family, **changes) for _ in range(2))
        if "LoRA" in name:
            alone, model = (with_lora(x, "q_proj", "lm_head") for x in (alone, model))
        batch = batch_of("both")
        expected, gradients = plain(alone, batch)
        sp = share_sequences(model, size=2, **section)
        if name == "checkpoints":
            model.gradient_checkpointing_enable()
        called = wrap(model)
        numbers = by_us(sp, called, **batch)
        loss_of(numbers).backward()
        check([x.detach() for x in numbers], expected, name)
        if wrap is in_fsdp:
            found = {name: array(p.grad.full_tensor()) for name, p in model.named_parameters()}
        else:
            found = averaged(model)  # of DDP's they are the same on all ranks
        assert gap(found, gradients) < 1e-5, name
        sp.close()


@on_each_of(2, keep="deepspeed")
def test_accelerates_precision_holds_in_tiles_too():
    batch, model, alone = batch_of("right"), model_for("llama"), model_for("llama")
    sp = share_sequences(model, size=2)
    share_accelerator(accelerator := Accelerator(cpu=True, mixed_precision="bf16"), sp)
    prepared, alone = accelerator.prepare(model), accelerator.prepare(alone)
    with whole_sequences(prepared):  # whose attention is the plain model's
        numbers = by_us(sp, prepared, **batch)
    expected = by_logits(alone, **batch)
    rounded, exact = ([x.detach() for x in found] for found in (expected, by_logits(model_for("llama"), **batch)))
    check([x.detach() for x in numbers], rounded, "bf16")
    assert (rounded[0] - exact[0]).abs().max() > 1e-4
    gradients = []
    for found, called in ((numbers, prepared), (expected, alone)):
        loss_of(found).backward()
        gradients.append({name: array(p.grad) for name, p in called.named_parameters()})
    assert gap(*gradients) < 1e-2  # of bf16, as sums are in another order
    sp.close()


@on_each_of(2, keep="deepspeed")
def test_a_balance_of_experts_in_trls_loss_is_that_of_whole_rows():
    batch, model, alone = batch_of("right"), with_trls_head("gpt_oss"), with_trls_head("gpt_oss")
    sp = share_sequences(model, size=2)
    found, expected = (x(**batch, fused_lm_head=True) for x in (model, alone))
    assert expected.aux_loss > 0.1
    for name in ("loss", "aux_loss"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=0)
        found[name].backward(retain_graph=True), expected[name].backward(retain_graph=True)
    assert gap(averaged(model), {name: array(p.grad) for name, p in alone.named_parameters()}) < 1e-5
    sp.close()


# --- memory, and what is sent


class Largest(TorchDispatchMode):
    """The most numbers that a storage has which an operation returned, and the bytes of all that was gathered."""

    def __init__(self):
        super().__init__()
        self.most = self.gathered = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(x, WholeTensor) for x in tree_leaves((args, kwargs))):
            with self:  # a mode is off while it is asked
                return WholeTensor.__torch_dispatch__(function, types, args, kwargs)
        result = function(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        if "gather" in function.name():
            self.gathered += sum(x.nbytes for x in tensors if function.namespace == "c10d")
        self.most = max(self.most, *(x.untyped_storage().nbytes() // x.element_size() for x in tensors), 0)
        return result


@on_each_of(2, keep="deepspeed")
def test_no_logits_exist_and_none_are_gathered():
    from trl.trainer import utils

    vocab, hidden, tokens = 4096, 32, 128
    ids = torch.randint(0, vocab, (ROWS, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    chunk, utils._CHUNKED_LOGPROB_CHUNK_SIZE = utils._CHUNKED_LOGPROB_CHUNK_SIZE, 256  # of the vocabulary
    seen = {}
    for way in (*WAYS, lambda sp, model, **batch: by_logits(model, **batch)):
        model = with_trls_head("llama", vocab_size=vocab, hidden_size=hidden, num_attention_heads=4)
        sp = share_sequences(model, size=2)
        with Largest() as seen[way]:
            loss_of(way(sp, model, **batch)).backward()
        sp.close()
    utils._CHUNKED_LOGPROB_CHUNK_SIZE = chunk
    logits = seen.pop(way)
    assert logits.most >= ROWS * tokens // 2 * vocab  # which shows that they would be seen
    for way, found in seen.items():
        assert found.most == vocab * hidden, way.__name__  # the head, and its gradient
        assert 0 < found.gathered < ROWS * tokens * hidden * 4 / 4, (way.__name__, found.gathered)


# --- refusals


class WithPenalty(LlamaForCausalLM):
    def forward(self, **inputs):
        return super().forward(**inputs)


@on_each_of(2)
def test_what_has_no_such_numbers_is_refused_on_every_rank():
    first, batch = dist.get_rank() == 0, batch_of("none")
    model, other, own = small(), small(), WithPenalty(small().config)
    sp, of_own = share_sequences(model, size=2), share_sequences(own, size=2)
    wide = {**batch, "labels": torch.full_like(batch["labels"], 5)} if first else batch
    for call, kind, words in (
        (lambda: sp.log_probs(other, **batch), "ConfigError", ("patched with this", "share_sequences")),
        (
            lambda: sp.log_probs(model if first else other, **batch),
            "DisagreementError" if first else "ConfigError",
            ("patched with this",),
        ),
        (lambda: sp.log_probs(torch.nn.Linear(2, 2), **batch), "ConfigError", ("transformers model", "Linear")),
        (lambda: of_own.log_probs(own, **batch), "ConfigError", ("forward of transformers", "WithPenalty")),
        (lambda: sp.log_probs(model, **batch, temperature=float(first)), None, ("temperature above 0",)),
        (lambda: sp.log_probs(model, **batch, temperature=1.0 + first), "DisagreementError", ("temperature",)),
        (lambda: sp.log_probs(model, **batch, return_entropy=first), "DisagreementError", ("entropy",)),
        (lambda: sp.log_probs(model, **wide), "DisagreementError", ("labels",)),
        (lambda: sp.log_probs(model, **sp.shard_batch(batch)), "InputError", ("whole rows", "placement")),
    ):
        refused = refusal(call)
        assert lacking(refused, kind or ("DisagreementError" if first else "InputError"), *words) == [], refused
    expected, _ = plain(small(), batch)  # the ranks are still in step
    check(by_us(sp, model, **batch), expected, "after all")


# --- the examples


@pytest.mark.slow
@pytest.mark.parametrize(("name", "word", "gain"), [("dpo_loop", "right", 0.15), ("grpo_loop", "reward", 0.3)])
def test_an_example_learns(name, word, gain, tmp_path):
    ran = scripts.run(2, tmp_path, ROOT / f"examples/{name}.py")
    assert not ran.failed, ran.stderr[-3000:]
    curve = [float(x) for x in re.findall(rf"{word} ([0-9.]+)", ran.stdout)]
    assert sum(curve[-5:]) / 5 > curve[0] + gain
