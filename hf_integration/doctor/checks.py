"""Check a transformers model.

Compare its weights across ranks, and compare one training step of a small copy with and without sequence parallelism.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Generator, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ds_seqpar.base.compat import whole_shape
from ds_seqpar.deepspeed.config import DeepSpeedJson, without_auto
from ds_seqpar.doctor import Finding, Job
from ds_seqpar.doctor.ranks import alike
from ds_seqpar.engine import initialize, start

from ..families import is_plain_head, set_balance_weight, unwrapped
from ..look.facts import text_config
from ..look.known import facts_of, heads, windows
from ..look.prove import GRADIENT, LOSS, TOLERANCE, compared, difference
from ..look.sizes import config_of
from ..look.small import small_copy, tokens_for
from ..model.patch import patch_by, unpatch_attention
from ..model.weights import fingerprint_of_bits, is_whole

NOISE = 8  # the maximum difference between steps, as a multiple of the effect of rounding-sized noise in the embeddings
LEAST = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}  # the minimum tolerance
RATE = 0.1  # the learning rate of the step, large enough to change 16-bit weights
UNSURE = 1e-3  # steps are not compared for weights with gradients below this fraction of the maximum
STEP, STEP_CHECK = "step of ", "optimizer step"
# DeepSpeed JSON keys that change gradients or steps
TRAINING = (
    "optimizer", "zero_optimization", "bf16", "bfloat16", "fp16", "gradient_clipping", "communication_data_type",
    "data_types", "prescale_gradients", "gradient_predivide_factor", "torch_autocast", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)  # fmt: skip
# the cause of a difference, by the first kind of batch in which it appears
CAUSES = {"padded": "padding is not masked: ", "packed": "documents are not kept apart: "}


def weights(job: Job) -> Generator[Any, list[Any], list[Finding]]:
    """Compare the shape, dtype, bits and `requires_grad` of every parameter and buffer across all ranks."""
    fields, whole = dict[str, str](), sum(map(is_whole, job.model.parameters()))
    for name, x in (*job.model.named_parameters(), *job.model.named_buffers()):
        form = f"{'trained' if x.requires_grad else 'frozen'} {str(x.dtype).removeprefix('torch.')} {whole_shape(x)}"
        fields[name] = f"{form} with digest {fingerprint_of_bits(x)}" if is_whole(x) else form
    advice = "load the same checkpoint on all ranks, or seed them alike before the model is made"
    found = alike("weights", (yield fields), advice, f"{whole} the same on {job.sp.topology.world_size} ranks")
    detail = "no rank has whole weights: ZeRO-3 keeps parts of them, and the meta device none"
    is_tried = whole or found.status == "fail"
    return [found if is_tried else Finding(check="weights", status="not tried", detail=detail)]


def loss_and_gradients(job: Job) -> list[Finding]:
    """Compare a small fp32 copy, patched and unpatched.

    The loss, outputs and all gradients are compared for three kinds of batches.
    """
    model = unwrapped(job.model)
    model = model if is_plain_head(model) else model.base_model  # a custom loss may count padding
    facts = facts_of(model)
    outcome = compared(model, job.sp, facts, lambda small: patch_by(small, small, job.sp, facts), unpatch_attention)
    detail = f"of a small copy, in plain, padded and packed batches, within {outcome.largest:.1e}"
    wrong = outcome.wrong and f"{CAUSES.get(outcome.kind, '')}a small copy is one {outcome.wrong}"
    advice = "report it, and do not train this model with sequence parallelism"
    return [Finding.of("loss and gradients", wrong, advice, detail)]


def step(job: Job) -> list[Finding]:
    """Compare one DeepSpeed engine step on two small copies, one of which shares sequences."""
    model, sp = unwrapped(job.model), job.sp
    if not is_plain_head(model):
        return [Finding(check=STEP_CHECK, status="not tried", detail=f"a {type(model).__name__} has a loss of its own")]
    content, accumulation, silent = _content(job.content), sp.accumulation_steps, logging.root.manager.disable
    logging.disable(logging.INFO)  # hides DeepSpeed's messages about each engine
    try:
        start()
        plain, noisy, shared = (_step(job, content, **how) for how in ({}, {"noise": True}, {"shared": True}))
    finally:
        logging.disable(silent)
        sp.accumulation_steps = accumulation
        gc.collect()  # engines are in reference cycles
    for name, gradient in plain[GRADIENT].items():
        sure = gradient.abs() > UNSURE * gradient.abs().max()
        for other in (noisy, shared):  # Adam's step depends on the sign, which rounding may flip
            sure &= (other[GRADIENT][name] - gradient).abs() <= gradient.abs() / 2
        for one in (plain, noisy, shared):
            one[STEP][name.replace(GRADIENT, STEP)] *= sure
    dtype, figures, wrong = DeepSpeedJson.read(content).known.dtype, [], ""
    for kind in plain:
        noise = NOISE * difference(plain[kind], noisy[kind], math.inf, 2)[1]
        allowed = max(LEAST[dtype], TOLERANCE[sp.config.comm_dtype], noise)
        differs, gap = difference(plain[kind], shared[kind], allowed, 2)  # a few neurons may switch on or off
        wrong = wrong or differs
        figures.append(f"{gap:.1e} of {allowed:.1e}")
    setting = f"ZeRO-{content.get('zero_optimization', {}).get('stage', 0)}, {content['optimizer']['type']}, {dtype}"
    detail = f"{setting}; loss, gradients and step differ by {', '.join(figures)} that noise allows"
    wrong = wrong and f"{wrong}, against a copy that shares no sequences ({setting})"
    advice = "take out of your code what scales losses or gradients, or try another ZeRO stage"
    return [Finding.of(STEP_CHECK, wrong, advice, detail)]


def _content(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a DeepSpeed JSON that affects the small copy's step."""
    kept = without_auto({name: content[name] for name in TRAINING if name in content})
    optimizer = kept.get("optimizer") or {"type": "AdamW", "params": {"torch_adam": True}}
    kept["optimizer"] = {**optimizer, "params": {**optimizer.get("params", {}), "lr": RATE}}
    if kept.get("fp16", {}).get("enabled"):
        kept["fp16"] |= {"loss_scale": 1}  # so that the first step is not skipped
    accumulation = without_auto(content).get("gradient_accumulation_steps", 1)
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": min(2, accumulation)}
    return {"gradient_clipping": 1.0, **kept, **sizes, "steps_per_print": 10**9}


def _step(job: Job, content: dict[str, Any], shared: bool = False, noise: bool = False) -> dict[str, dict[str, Tensor]]:
    """Return the loss of one step of a small copy, and each parameter's whole gradient and change.

    Args:
        job: The job to check.
        content: The DeepSpeed JSON.
        shared: Whether groups share sequences. If not, each rank computes the sequences of all groups.
        noise: Whether to add noise to the embeddings, as large as the rounding error of their dtype.
    """
    model, sp = unwrapped(job.model), job.sp
    small, steps = small_copy(model, sp.device)[0].train(), content["gradient_accumulation_steps"]
    set_balance_weight(small, 0.0)  # a balance loss depends on how tokens are batched, which differs here
    if noise:
        eps = torch.finfo(getattr(torch, DeepSpeedJson.read(content).known.dtype)).eps
        weight = small.get_input_embeddings().weight
        signs = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), device="cpu").sign()
        weight.data *= 1 + eps * signs.to(weight.device)
    before = {name: p.detach().clone() for name, p in small.named_parameters()}
    ids = tokens_for(small.config, steps * sp.data_size, max(23, 2 * sp.multiple + 5)).to(sp.device)
    microbatches = [{"input_ids": x, "labels": x} for x in ids.split(sp.data_size)]
    if shared:
        patch_by(small, small, sp, facts := facts_of(model))
        engine = initialize(model=small, config=content, sequence_parallel=sp, check_loss=False, doctor=False)[0]
        microbatches = [{name: x[sp.data_rank, None] for name, x in batch.items()} for batch in microbatches]
        if facts.shift_labels:  # other losses support only whole batches
            microbatches = sp.shard_batches(microbatches)
    else:
        engine = deepspeed.initialize(model=small, config=content)[0]
    losses, outcome = [], dict[str, dict[str, Tensor]]({LOSS: {}, GRADIENT: {}, STEP: {}})
    for batch in microbatches:
        losses.append(engine(**batch).loss)
        engine.backward(losses[-1])
        if len(losses) == steps:
            for name, p in small.named_parameters():
                whole = safe_get_full_grad(p)
                whole = torch.zeros_like(before[name]) if whole is None else whole.float().clone()
                outcome[GRADIENT][GRADIENT + name] = whole
        engine.step()
    outcome[LOSS][LOSS] = torch.tensor(sp.mean_loss(losses), dtype=torch.float64)
    for name, p in small.named_parameters():
        after = safe_get_full_fp32_param(p)
        outcome[STEP][STEP + name] = (p.detach() if after is None else after).float() - before[name]
    engine.destroy()
    return outcome


CHECKS = (("weights", weights), ("loss and gradients", loss_and_gradients), (STEP_CHECK, step))


def shape_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the `Job` fields that depend on the model's attention."""
    text, numbers, lengths = text_config(model.config), heads(model), windows(model)
    head_dim = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // numbers[0]
    window = min((length for length in lengths if length is not None), default=None)
    shape = {"heads": numbers, "head_dim": head_dim, "window": window}
    return shape | {"softcap": getattr(text, "attn_logit_softcapping", None)}


def model_of(place: str | None, ranks: int) -> PreTrainedModel:
    """Return a model on the meta device, built from the config in a folder.

    Without a folder, return a Llama model that `ranks` ranks can share.
    """
    q_heads = 8 * -(-ranks // 8)
    config = LlamaConfig(num_attention_heads=q_heads, num_key_value_heads=q_heads // 4, hidden_size=64, head_dim=64,
                         intermediate_size=128, vocab_size=256, num_hidden_layers=2)  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config if place is None else config_of(place))
