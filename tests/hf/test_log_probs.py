"""Numbers a token of a patched model, by trl's head and by `sp.log_probs`: the plain model's, without its logits."""

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from ds_seqpar.whole import WholeTensor
from hf_integration import share_accelerator, share_sequences, whole_sequences
from tests import grids, scripts
from tests.dist.ranks import lacking, refusal
from tests.hf.conformance import WAYS, Case, Way, assert_cases
from tests.hf.families import model_of
from tests.hf.llama import IGNORE, array, averaged, checkpointed, gap, small, with_lora
from tests.launch import on_each_of

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


def loss_of(numbers):
    """That weighs each number of its own, so that each has a gradient of its own."""
    draw = torch.Generator().manual_seed(9)
    return sum((x * torch.randn(x.shape, generator=draw)).sum() for x in numbers)


def weighed(numbers):
    likely, entropy = numbers
    return loss_of(numbers), torch.stack([likely, 2 * entropy])  # of like size


def of_logits(model, batch):
    return weighed(by_logits(model, **batch))


def way(function):
    return Way(of_logits, lambda model, sp, batch, part: weighed(function(sp, model, **batch)))


WAYS |= {"trl's head": way(by_trl), "sp.log_probs": way(by_us)}
BOTH = "trl's head", "sp.log_probs"


def check(found, expected, case):
    for number, wanted in zip(found, expected, strict=True):
        assert number.dtype == wanted.dtype, case
        assert (number - wanted).abs().max() <= 1e-5 * wanted.abs().max(), case


def on_engines(cases):
    """Cases by (size, stage, family): the paddings are the micro-batches of a step."""
    for key, given in itertools.groupby(cases, lambda case: tuple(case[axis] for axis in ENGINE)):
        (size, stage, family), paddings = key, [case["padding"] for case in given]
        section = {"size": size, "ulysses": min(size, 2)}
        around = {"wrapper": f"ZeRO-{stage}", "steps": len(paddings)}
        batch = functools.partial(batch_by, paddings)
        yield key, Case(functools.partial(with_trls_head, family), section, batch, BOTH, **around)


def batch_by(paddings, number):
    return batch_of(paddings[number % len(paddings)])


ENGINES = [
    case
    for case in grids.cover(**{axis: AXES[axis] for axis in ENGINE})
    if case["size"] < 4 or case["family"] in ("llama", "gemma2")
]
FEW = grids.cover(lambda case: {axis: case[axis] for axis in ENGINE} in ENGINES, **AXES)
REST = [case for case in grids.whole(**AXES) if case not in FEW]


@pytest.mark.parametrize("cases", grids.few_then_rest(FEW, REST))
@pytest.mark.parametrize("size", AXES["size"])
@on_each_of("size", keep="deepspeed", timeout=300)
def test_an_engines_numbers_and_gradients_are_the_plain_models(size, cases):
    assert_cases(dict(on_engines(case for case in cases if case["size"] == size)))


# --- whoever stands around the model, and whatever makes it other than plain


def adapted(name, *targets):
    return with_lora(model_for(name), *targets)


TIED, TWO = functools.partial(model_for, "llama", tie_word_embeddings=True), {"size": 2}
LLAMA, QWEN = (functools.partial(model_for, name) for name in ("llama", "qwen3"))
OURS = {"batch": functools.partial(batch_by, ["both"]), "ways": ["sp.log_probs"]}
AROUND = {
    "DDP": Case(LLAMA, TWO, **OURS, wrapper="DDP"),
    "DDP, LoRA on the head": Case(
        functools.partial(adapted, "llama", "q_proj", "lm_head"), TWO, **OURS, wrapper="DDP, unused parameters"
    ),
    "FSDP2": Case(LLAMA, TWO, **OURS, wrapper="FSDP2"),
    "tied, in loss tiles": Case(TIED, {"loss_tiles": 3}, **OURS),
    "head chunks, tiled MLPs": Case(QWEN, {"head_chunks": 2, "mlp_tiles": 3}, **OURS),
    "scaled logits": Case(functools.partial(model_for, "cohere2"), {"ulysses": 1}, **OURS),
    "divided logits": Case(functools.partial(model_for, "granite"), {"ulysses": 1}, **OURS),
    "compiled": Case(LLAMA, TWO, **OURS, wrapper="compiled layers, aot_eager"),
    "checkpoints": Case(QWEN, TWO, **OURS, prepared=checkpointed),
}
QUICK = ["DDP, LoRA on the head", "FSDP2", "tied, in loss tiles", "scaled logits"]


@pytest.mark.parametrize("names", grids.few_then_rest(QUICK, [name for name in AROUND if name not in QUICK]))
@on_each_of(2, keep="deepspeed")
def test_wrappers_and_settings_change_nothing(names):
    assert_cases({name: AROUND[name] for name in names})


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
    for way in (by_trl, by_us, lambda sp, model, **batch: by_logits(model, **batch)):
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
    # the ranks are still in step
    check(by_us(sp, model, **batch), by_logits(small(), **batch), "after all")


# --- the examples


@pytest.mark.slow
@pytest.mark.parametrize(("name", "word", "gain"), [("dpo_loop", "right", 0.15), ("grpo_loop", "reward", 0.3)])
def test_an_example_learns(name, word, gain, tmp_path):
    ran = scripts.run(2, tmp_path, ROOT / f"examples/{name}.py")
    assert not ran.failed, ran.stderr[-3000:]
    curve = [float(x) for x in re.findall(rf"{word} ([0-9.]+)", ran.stdout)]
    assert sum(curve[-5:]) / 5 > curve[0] + gain
