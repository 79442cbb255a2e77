"""Rows that share a prompt, given to a patched model with trl's fused head: it computes the prompt once, and gives the
plain model's numbers of all rows."""

import itertools

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from hf_integration import patch_attention, whole_sequences
from tests.dist.ranks import lacking, make, refusal
from tests.hf.every_type import tiny
from tests.hf.families import model_of
from tests.hf.llama import IGNORE
from tests.launch import on_each_of, on_ranks

ROWS = ((0, 7), (1, 3), (0, 1), (0, 4), (2, 5), (1, 6))  # (prompt, tokens of the completion); the third has one row
PROMPTS = (9, 5, 4)
OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")
WAYS = {
    2: (
        {"layout": "zigzag", "ulysses": 1},
        {"schedule": "distflash", "ulysses": 1},
        {"ulysses": 2},
        {"layout": "striped", "ulysses": 1, "head_chunks": 2},
    ),
    4: (
        *({"schedule": "ring", "ulysses": 1, "layout": x} for x in ("zigzag", "striped", "balanced", "contiguous")),
        {"schedule": "attention2d", "rows": 2, "ulysses": 1},
        {"schedule": "double_ring", "ring_size": 2, "ulysses": 1},
        {"schedule": "wallfacer", "ulysses": 1},
        {"schedule": "mesh", "mesh": (2, 1, 2), "ulysses": 1, "overlap": True},
        {"schedule": "distflash", "ulysses": 2},
        {"ulysses": 2, "rotate_forward": "q", "rotate_backward": "q"},
    ),
    3: ({"schedule": "triangle", "ulysses": 1},),
    1: ({},),
}


def latents():
    model = tiny("deepseek_v3")
    model.config.output_router_logits = False  # trl's head cannot count the experts of this type
    return model


MODELS = {
    "llama": lambda: model_of("llama"),
    "gemma2": lambda: model_of("gemma2"),  # with a window that holds a whole row
    "gpt2": lambda: tiny("gpt2"),  # whose positions are learned, and count padding
    "opt": lambda: tiny("opt"),  # whose positions do not
    "deepseek_v3": latents,
    "dynamic": lambda: model_of("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    "experts": lambda: model_of("qwen3_moe"),  # whose loss balances them over all tokens of the rows
    "experts alone": lambda: model_of("gpt_oss", output_router_logits=False),
}


def batch(padding="both"):
    """Completions of three prompts in any order, padded as trl's GRPO pads ("both") or as its DPO does ("right")."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 60, (length,), generator=draw) for length in PROMPTS]
    ids = torch.zeros(len(ROWS), max(PROMPTS) + max(length for _, length in ROWS), dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
    for row, (prompt, length) in enumerate(ROWS):
        first = max(PROMPTS) if padding == "both" else PROMPTS[prompt]
        begin, end = first - PROMPTS[prompt], first + length
        ids[row, begin:first], mask[row, begin:end] = prompts[prompt], 1
        ids[row, first:end] = labels[row, first:end] = torch.randint(3, 60, (length,), generator=draw)
    labels[1, max(PROMPTS) + 1] = IGNORE  # in a completion, as a tool's answer
    labels[0, 0] = ids[0, 0]  # which nothing predicts
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "fused_lm_head": True}


def results(model, inputs):
    """(what the model gives a token, each parameter's gradient of a random sum of it)."""
    output = model(**inputs)
    draw = torch.Generator().manual_seed(1)
    terms = [output[name] * torch.randn(output[name].shape, generator=draw) for name in ("log_probs", "entropy")]
    balance = 0 if output.aux_loss is None else output.aux_loss
    (sum(x.sum() for x in terms) + balance).backward()
    found = [*(output[name].double() + 0 for name in OUTPUTS), output.loss, torch.as_tensor(balance)]
    return found, [x.grad for x in model.parameters() if x.grad is not None]


def patched(model, setting=True, **way):
    """(SequenceParallel, the model with trl's fused head, what its base model computes of each call, on this rank)."""
    add_fused_lm_head(model, outputs=OUTPUTS)
    sp, counted = make(shared_prompts=setting, prove="never", **way), []
    patch_attention(model, sp)
    model.base_model.register_forward_hook(lambda _, __, output: counted.append(output[0].shape[:2].numel()))
    return sp, model, counted


def tokens_of(sp, counted):
    return int(sp.sum_over_ranks(torch.tensor(counted[-1])))


def _gap(found, expected, least):
    """max|a-b| / max|b|, or of `least` where that is greater; infinite where something is not a number."""
    a, b = found.detach().double(), expected.detach().double()
    gap = float((a - b).abs().max() / b.abs().max().clamp(min=least))
    return gap if gap == gap else float("inf")


def compared(cases):
    """Of each case the largest error of the patched model, and the tokens that all ranks computed."""
    found = []
    for name, way, padding in cases:
        plain = MODELS[name]()
        add_fused_lm_head(plain, outputs=OUTPUTS)
        numbers, grads = results(plain, batch(padding))
        sp, model, counted = patched(MODELS[name](), **way)
        shared, shared_grads = results(model, batch(padding))
        shared_grads = [sp.sum_over_ranks(x) / sp.size for x in shared_grads]
        # gradients that are 0 but for rounding, as of a bias of keys, beside the greatest ones
        largest = max(float(x.abs().max()) for x in grads)
        gaps = [_gap(a, b, 1.0) for a, b in zip(shared, numbers, strict=True)]
        gaps += [_gap(a, b, 0.1 * largest) for a, b in zip(shared_grads, grads, strict=True)]
        found.append((max(gaps), tokens_of(sp, counted)))
    return found


EACH = {ranks: [*itertools.product(MODELS, ways, ("both",))] for ranks, ways in WAYS.items()}
for cases in EACH.values():
    cases += [("llama", way, "right") for _, way, _ in cases[: len(cases) // len(MODELS)]]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("llama", WAYS[2][0], "both"), ("gpt2", WAYS[2][2], "both"), ("opt", WAYS[2][3], "right")]),
        (1, [("llama", {}, "both")]),
        (4, [("llama", WAYS[4][4], "right"), ("experts", WAYS[4][8], "both")]),
        *(pytest.param(ranks, cases, marks=pytest.mark.slow) for ranks, cases in EACH.items()),
    ],
)
def test_numbers_and_gradients_are_those_of_the_rows(ranks, cases):
    # of a prompt all but its last token, and of each row that one and all but the last of its completion
    once = sum(PROMPTS) - len(PROMPTS) + sum(length for _, length in ROWS)
    for by_rank in on_ranks(ranks, compared, cases, timeout=400):
        for case, (gap, tokens) in zip(cases, by_rank, strict=True):
            assert gap < 1e-5, case
            assert tokens == once + len(ROWS) * (case[0] == "experts"), (
                case
            )  # their balance counts each row's last token


def chosen(rows, **changes):
    return {name: x[rows] if isinstance(x, torch.Tensor) else x for name, x in batch().items()} | changes


@on_each_of(2)
def test_rows_are_computed_as_they_are_where_nothing_is_shared():
    everything, alone = batch(), chosen([0, 1, 4])
    without_labels = {**everything, "labels": torch.full_like(everything["labels"], IGNORE)}
    for setting, window, inputs, shares in (
        ("auto", 20, everything, True),
        ("auto", 16, everything, True),
        ("auto", 15, everything, False),
        (False, 20, everything, False),
        (True, 20, alone, False),
        ("auto", 20, without_labels, False),
    ):
        sp, model, counted = patched(model_of("mistral", window=window), setting, ulysses=1)
        numbers = model(**inputs).log_probs + 0
        with whole_sequences(model):
            expected = model(**inputs).log_probs
        assert _gap(numbers, expected, 1.0) < 1e-5
        assert (tokens_of(sp, counted[:1]) < inputs["input_ids"].numel()) is shares, (setting, window)


@on_each_of(2)
def test_what_cannot_be_shared_is_refused_where_it_must_be():
    for model, inputs, words in (
        (model_of("mistral", window=6), {}, ("windows and chunks of 16", "got one of 6")),
        (model_of("llama").train(), {}, ("without dropout",)),
        (tiny("qwen3_next"), {}, ("layers that have a state",)),
        (model_of("llama"), {"position_ids": torch.arange(16)[None].repeat(6, 1)}, ("got position_ids",)),
    ):
        if "without dropout" in words:
            model.base_model.layers[0].post_attention_layernorm = torch.nn.Sequential(
                model.base_model.layers[0].post_attention_layernorm, torch.nn.Dropout(0.5)
            )
        _, model, _ = patched(model, ulysses=1)
        refused = refusal(model, **chosen(slice(None), **inputs))
        assert lacking(refused, "ConfigError", "shared_prompts", *words) == []
    _, model, _ = patched(model_of("llama"), ulysses=1)
    for labels, words in (
        (batch()["labels"][:, :-1], ("(6, 15)", "input_ids (6, 16)")),
        (batch()["labels"][0], ("shape (batch, seq)",)),
        (batch()["labels"].int(), ("int64", "int32")),
    ):
        assert lacking(refusal(model, **chosen(slice(None), labels=labels)), "InputError", *words) == []


@on_each_of(2)
def test_a_loop_of_ones_own_computes_prompts_once_too():
    plain, rows = model_of("llama"), batch()
    add_fused_lm_head(plain, outputs=OUTPUTS)
    expected, grads = results(plain, rows)
    rows.pop("fused_lm_head")
    for setting in (True, False):
        sp, model, counted = make(shared_prompts=setting, ulysses=1), model_of("llama"), []
        patch_attention(model, sp).base_model.register_forward_hook(
            lambda _, __, output, counted=counted: counted.append(output[0].shape[:2].numel())
        )
        found = sp.log_probs(model, **rows, return_entropy=True)
        draw = torch.Generator().manual_seed(1)
        sum((x * torch.randn(x.shape, generator=draw)).sum() for x in found).backward()
        assert all(_gap(a, b, 1.0) < 1e-5 for a, b in zip(found, expected, strict=False))
        assert (
            _gap(
                torch.cat([sp.sum_over_ranks(x.grad).flatten() / sp.size for x in model.parameters()]),
                torch.cat([x.flatten() for x in grads]),
                0.0,
            )
            < 1e-5
        )
        assert (tokens_of(sp, counted) < rows["input_ids"].numel()) is setting
