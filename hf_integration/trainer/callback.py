"""Metrics that a sequence parallel run adds to the Trainer's log: tokens per second, MFU and memory.

Model flops utilization (MFU) is the flops of training steps divided by the devices' peak flops in the same time.
Recomputation in checkpoints or kernels is not counted.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ds_seqpar import SequenceParallel
from ds_seqpar.base.compat import whole_shape
from ds_seqpar.base.errors import InputError
from ds_seqpar.data.batches import lengths_of
from ds_seqpar.guards.agreement import all_gather_objects

from ..compat import whole_numel
from ..families import unwrapped
from ..look.facts import modules_of
from ..look.known import facts_of, heads, windows

# peak flops/s in bf16 and fp16 without sparsity, by pattern of the device name. Source: NVIDIA's data sheets
PEAKS = {r"A100": 312e12, r"H100 80GB HBM3": 989e12, r"H200(?! NVL)": 989e12}


def peak(device: torch.device, half: bool) -> float | None:
    """Return the peak flops/s of a device, or None if unknown.

    Args:
        device: The device.
        half: Whether the device multiplies in bf16 or fp16.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and half else ""
    return next((rate for pattern, rate in PEAKS.items() if re.search(pattern, name)), None)


class FlopCounter:
    """Counter for the flops of a patched model's training steps.

    Each matrix weight takes six flops per token: two in forward, two for the input gradient and two for the weight
    gradient. A frozen weight takes only four flops per token, since it has no gradient. Expert weights count only for
    the tokens routed to the expert, and embedding weights do not count at all. For each pair of a query and a key,
    attention computes two products in forward and four in backward.
    """

    def __init__(self, model: nn.Module) -> None:
        base = unwrapped(model)
        # peft keeps the original of each module that it copies for training
        parameters = [x for x in base.named_parameters(remove_duplicate=False) if "original_module" not in x[0]]
        self.flops_of_token = sum(_weights(base, name, x) * (4 + 2 * x.requires_grad) for name, x in parameters)
        self.windows, modules = windows(base), modules_of(base, facts_of(base)).values()
        self.flops_of_pair = [6 * heads(base)[0] * _dims(module) for module in modules]

    def of_documents(self, lengths: Sequence[int]) -> float:
        """Return the flops for training on documents with the given lengths in tokens."""
        from ds_seqpar.planner.request import visible_pairs

        pairs = sum(
            flops * visible_pairs(lengths, window)
            for flops, window in zip(self.flops_of_pair, self.windows, strict=True)
        )
        return self.flops_of_token * sum(lengths) + pairs


def _dims(module: Any) -> int:
    """Return the sum of the head_dims of keys and values, which differ in latent attention."""
    return module.qk_head_dim + module.v_head_dim if hasattr(module, "qk_head_dim") else 2 * module.head_dim


def _weights(model: Any, name: str, parameter: nn.Parameter) -> float:
    """Return the number of a matrix's weights that each token uses, or 0 for vectors and embeddings."""
    shape = whole_shape(parameter)
    if len(shape) < 2 or "embed" in name or name.endswith("bias"):
        return 0
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features  # quantized parameters have fewer elements
    experts: float = model.config.num_experts_per_tok / shape[0] if len(shape) > 2 else 1
    return whole_numel(parameter) * experts


class SequenceParallelCallback(TrainerCallback):
    """A callback that adds metrics to every training log.

    - `tokens_per_second`: the number of tokens per second on all ranks, excluding padding.
    - `memory_gib`: the maximum peak memory over all ranks, allocated on the device or resident on a CPU.
    - `mfu`: model flops divided by the peak flops of all ranks, from 0 to 1, if the device's peak is known.
    - In the first log only, the shape: `sp_size`, `sp_ulysses`, `sp_inner` (the CP size), `data_groups`.

    The measured time includes training steps and data loading, but not evaluation or saving. The metrics are printed,
    reported, and passed to `on_log` of later callbacks, but not written to `trainer_state.json`.

    Args:
        sp: The `SequenceParallel` of the model.
        peak: Peak flops/s of a rank's device, the same on all ranks. By default, the bf16 and fp16 peak is looked up by
            device name.
    """

    def __init__(self, sp: SequenceParallel, peak: float | None = None) -> None:
        self.sp, self.peak = sp, peak
        self.flop_counter: FlopCounter | None = None
        self.flops_done = self.tokens = self.seconds = 0.0
        self.step_began: float | None = None
        self.figures: dict[str, Any] = {}  # metrics for the next log
        self.shape_logged = False

    def start(self) -> None:
        """Start the clock of a training step, before its data is loaded."""
        self.step_began = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.peak = self.peak or peak(args.device, args.bf16 or args.fp16)
        self.flop_counter = FlopCounter(kwargs["model"]) if self.peak else None

    def count(self, batch: Mapping[str, Any]) -> None:
        """Count the tokens and flops of a whole batch.

        Of these tokens and flops, `1 / sp.size` is this rank's share.
        """
        try:
            lengths = lengths_of(batch)
        except InputError:  # the forward will raise the error on all ranks
            return
        self.tokens += sum(lengths) / self.sp.size
        if self.flop_counter is not None:
            self.flops_done += self.flop_counter.of_documents(lengths) / self.sp.size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure(args, control)

    on_epoch_end = on_step_end

    def _measure(self, args: Any, control: Any) -> None:
        """Gather the metrics of all ranks if a log follows. Unlike `on_log`, `_measure` runs on all ranks."""
        if self.step_began is not None:
            self.seconds += time.perf_counter() - self.step_began
            self.step_began = None
        if not control.should_log or not self.seconds:
            return
        figures = self.tokens, self.seconds, memory_gib(args.device), self.flops_done
        by_rank = all_gather_objects(self.sp.control_world, ("figures to log", figures))
        all_figures = torch.tensor([figures for _, figures in by_rank], dtype=torch.float64, device="cpu")
        seconds = float(all_figures[:, 1].max())
        self.figures = {
            "tokens_per_second": round(float(all_figures[:, 0].sum()) / seconds, 1),
            "memory_gib": round(float(all_figures[:, 2].max()), 3),
        }
        if self.peak:
            self.figures["mfu"] = round(float(all_figures[:, 3].sum()) / (seconds * self.peak * len(all_figures)), 4)
        if not self.shape_logged:
            self.figures |= shape(self.sp)
            self.shape_logged = True
        self.flops_done = self.tokens = self.seconds = 0.0

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.sp.checker.flush(last=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            logs.update(self.figures)  # state.log_history is not updated, since it must stay reproducible
            self.figures = {}


def shape(sp: SequenceParallel) -> dict[str, int]:
    """Return the shape of sequence parallelism as numbers, which every logging integration accepts."""
    ulysses = sp.config.ulysses
    return {"sp_size": sp.size, "sp_ulysses": ulysses, "sp_inner": sp.size // ulysses, "data_groups": sp.data_size}


def memory_gib(device: torch.device) -> float:
    """Return this rank's peak memory so far in GiB, either allocated on the GPU or resident in a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
