"""Figures that a sequence parallel run adds to the Trainer's log: tokens a second, utilisation, memory; the shape,
once.

Model flops utilisation (MFU) is the flops of training steps over the most that the devices could do in that time. What
checkpoints or kernels compute again does not count.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from ds_seqpar import SequenceParallel
from ds_seqpar.data.batches import lengths_of
from ds_seqpar.errors import InputError
from ds_seqpar.runtime.comm import explaining_failure

from ..families import attentions, heads, unwrapped, windows
from ..memory.weight_slices import INWARD, OUTWARD
from .job import elements

# name of a device -> flops/s in bf16 and fp16, without sparsity. Source: NVIDIA's data sheets
PEAKS = {r"A100": 312e12, r"H100 80GB HBM3": 989e12, r"H200(?! NVL)": 989e12}


def peak(device: torch.device, half: bool) -> float | None:
    """The most flops/s of a device; None: not known. half: whether it multiplies in bf16 or fp16."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and half else ""
    return next((rate for pattern, rate in PEAKS.items() if re.search(pattern, name)), None)


class FlopCounter:
    """Counts the flops of a patched model's training steps.

    For each weight and token a matrix takes two flops in forward, and two for its own gradient where it is trained. It
    takes two more for its input's gradient, where that input depends on a trained parameter. An expert's matrix meets
    the tokens that go to it. Attention takes all its gradients where q, k or v has one. Every norm counts as a part
    before the matrices of its layer.
    """

    def __init__(self, model: nn.Module) -> None:
        base = unwrapped(model)
        # peft leaves a module that it trains a copy of in place
        parameters = [x for x in base.named_parameters(remove_duplicate=False) if "original_module" not in x[0]]
        lowest = min((_place(name) for name, x in parameters if x.requires_grad), default=(math.inf, math.inf))
        if hasattr(base, "_require_grads_hook"):  # of transformers' enable_input_require_grads
            lowest = (-math.inf,)
        self.flops_of_token = sum(
            _weights(base, name, x) * (2 + 2 * x.requires_grad + 2 * (_place(name) > lowest)) for name, x in parameters
        )
        self.windows, modules = windows(base), attentions(base)
        # forward has two products for each pair, backward four
        passes = 2 * heads(base)[0]
        self.flops_of_pair = [
            passes * module.head_dim * (6 if lowest < (module.layer_idx, OUTWARD_PART) else 2) for module in modules
        ]

    def of_documents(self, lengths: Sequence[int]) -> float:
        """The flops of training on documents of these lengths, in tokens."""
        from ds_seqpar.planner.request import visible_pairs

        pairs = sum(
            each * visible_pairs(lengths, window) for each, window in zip(self.flops_of_pair, self.windows, strict=True)
        )
        return self.flops_of_token * sum(lengths) + pairs


# parts of a layer in the order in which a forward comes to them; a norm is part 0
FOOTPRINT_ITEMS = ({*INWARD, "lm_head"}, {OUTWARD}, {"mlp"}, {"down_proj"})
OUTWARD_PART = 2


def _place(name: str) -> tuple[float, ...]:
    """When a forward uses a parameter: its layer, part of the layer, and part of an adapter. Equal ones read the same
    input."""
    if "embed" in name:
        return (-1,)
    layer, parts = re.search(r"\blayers\.(\d+)\.", name), set(name.split("."))
    part = max((number for number, names in enumerate(FOOTPRINT_ITEMS, 1) if names & parts), default=0)
    return (int(layer[1]) if layer else math.inf, part, "lora_B" in parts)


def _weights(model: Any, name: str, parameter: nn.Parameter) -> float:
    """The weights of a matrix that a token meets; 0 for what is no matrix, or read by index."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # of ZeRO-3, which leaves nothing in a parameter
    if len(shape) < 2 or "embed" in name or name.endswith("bias"):
        return 0
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features  # a quantised parameter has fewer elements
    experts: float = model.config.num_experts_per_tok / shape[0] if len(shape) > 2 else 1
    return elements(parameter) * experts


class SequenceParallelCallback(TrainerCallback):
    """Adds figures to every training log.

    - `tokens_per_second`: of all ranks, without padding.
    - `memory_gib`: the greatest of all ranks, allocated on the device, or resident on a CPU.
    - `mfu`: model flops over the peak of all ranks, from 0 to 1, where the device's peak is known.
    - In the first log alone, the shape: `sp_size`, `sp_ulysses`, `sp_inner` (ranks of the schedule), `data_groups`.

    peak: flops/s of a rank's device at most, the same on all ranks; default: by the device's name, in bf16 and fp16.

    The time is that of training steps with their data loading; evaluation and saving do not count. They are in what is
    printed, reported and given to `on_log` of later callbacks, not in `trainer_state.json`.
    """

    def __init__(self, sp: SequenceParallel, peak: float | None = None) -> None:
        self.sp, self.peak = sp, peak
        self.flop_counter: FlopCounter | None = None
        self.flops_done = self.tokens = self.seconds = 0.0
        self.step_began: float | None = None
        self.figures: dict[str, Any] = {}  # for the next log
        self.shape_logged = False

    def start(self) -> None:
        """Starts the clock of a training step, before its data is loaded."""
        self.step_began = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.peak = self.peak or peak(args.device, args.bf16 or args.fp16)
        self.flop_counter = FlopCounter(kwargs["model"]) if self.peak else None

    def count(self, batch: Mapping[str, Any]) -> None:
        """Counts the tokens and flops of a whole batch, of which this rank has 1 / sp.size."""
        try:
            lengths = lengths_of(batch)
        except InputError:  # the forward will raise it, on all ranks
            return
        self.tokens += sum(lengths) / self.sp.size
        if self.flop_counter is not None:
            self.flops_done += self.flop_counter.of_documents(lengths) / self.sp.size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure(args, control)

    on_epoch_end = on_step_end

    def _measure(self, args: Any, control: Any) -> None:
        """Gathers the figures of all ranks where a log follows. All ranks call it, while `on_log` may be called on one
        rank alone."""
        if self.step_began is not None:
            self.seconds += time.perf_counter() - self.step_began
            self.step_began = None
        if not control.should_log or not self.seconds:
            return
        figures = self.tokens, self.seconds, memory_gib(args.device), self.flops_done
        own_figures = torch.tensor(figures, dtype=torch.float64, device="cpu")
        every = torch.empty(dist.get_world_size(), len(figures), dtype=torch.float64, device="cpu")
        with explaining_failure("the comparison of figures to log", self.sp.control_world):
            dist.all_gather(list(every.unbind()), own_figures, group=self.sp.control_world)
        seconds = float(every[:, 1].max())
        self.figures = {
            "tokens_per_second": round(float(every[:, 0].sum()) / seconds, 1),
            "memory_gib": round(float(every[:, 2].max()), 3),
        }
        if self.peak:
            self.figures["mfu"] = round(float(every[:, 3].sum()) / (seconds * self.peak * len(every)), 4)
        if not self.shape_logged:
            self.figures |= shape(self.sp)
            self.shape_logged = True
        self.flops_done = self.tokens = self.seconds = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            logs.update(self.figures)  # not in state.log_history: that is equal for equal runs, and times are not
            self.figures = {}


def shape(sp: SequenceParallel) -> dict[str, int]:
    """The shape of sequence parallelism, as numbers that every logging integration takes."""
    ulysses = sp.config.ulysses
    return {"sp_size": sp.size, "sp_ulysses": ulysses, "sp_inner": sp.size // ulysses, "data_groups": sp.data_size}


def memory_gib(device: torch.device) -> float:
    """The most memory that this rank has used so far: allocated on the GPU, or resident in a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
