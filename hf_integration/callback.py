"""What a sequence parallel run adds to the Trainer's log: tokens a second, utilisation, memory; the shape, once.

Model flops utilisation (MFU) is the flops that training steps have over those that the devices could do at most. What
is computed again, by checkpoints or kernels, does not count.
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
from ds_seqpar.batches import lengths_of
from ds_seqpar.errors import InputError

from .families import attentions, heads, unwrapped, windows
from .job import elements
from .slices import INWARD, OUTWARD

# flops/s in bf16 and fp16, without sparsity, by what the device is called. Source: NVIDIA's data sheets
PEAKS = {r"A100": 312e12, r"H100 80GB HBM3": 989e12, r"H200(?! NVL)": 989e12}


def peak(device: torch.device, half: bool) -> float | None:
    """Flops/s of a device at most, None where that is not known. half: whether it multiplies in bf16 or fp16."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and half else ""
    return next((rate for pattern, rate in PEAKS.items() if re.search(pattern, name)), None)


class Flops:
    """Of the training steps of a patched model.

    For each weight and token a matrix takes two in forward, and two for its own gradient where it is trained. It takes
    two more for its input's gradient, where that input hangs on a trained parameter. An expert's matrix meets the
    tokens that go to it. Attention takes all its gradients where q, k or v has one. Every norm counts as a part before
    the matrices of its layer.
    """

    def __init__(self, model: nn.Module) -> None:
        base = unwrapped(model)
        # peft leaves a module that it trains a copy of in place
        parameters = [x for x in base.named_parameters(remove_duplicate=False) if "original_module" not in x[0]]
        lowest = min((_place(name) for name, x in parameters if x.requires_grad), default=(math.inf, math.inf))
        if hasattr(base, "_require_grads_hook"):  # of transformers' enable_input_require_grads
            lowest = (-math.inf,)
        self.each_token = sum(
            _weights(base, name, x) * (2 + 2 * x.requires_grad + 2 * (_place(name) > lowest)) for name, x in parameters
        )
        self.windows, modules = windows(base), attentions(base)
        # forward has two products for each pair, backward four
        passes = 2 * heads(base)[0]
        self.each_pair = [
            passes * module.head_dim * (6 if lowest < (module.layer_idx, OUTWARD_PART) else 2) for module in modules
        ]

    def of(self, lengths: Sequence[int]) -> float:
        """lengths: tokens of the documents that are trained on."""
        from ds_seqpar.planner.request import pairs_of

        pairs = sum(each * pairs_of(lengths, window) for each, window in zip(self.each_pair, self.windows, strict=True))
        return self.each_token * sum(lengths) + pairs


# parts of a layer in the order in which a forward comes to them; a norm is part 0
PARTS = ({*INWARD, "lm_head"}, {OUTWARD}, {"mlp"}, {"down_proj"})
OUTWARD_PART = 2


def _place(name: str) -> tuple[float, ...]:
    """When a forward uses a parameter: its layer, part of the layer, and part of an adapter. Equal ones read the same
    input."""
    if "embed" in name:
        return (-1,)
    layer, parts = re.search(r"\blayers\.(\d+)\.", name), set(name.split("."))
    part = max((number for number, names in enumerate(PARTS, 1) if names & parts), default=0)
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
        self.flops: Flops | None = None
        self.done = self.tokens = self.seconds = 0.0
        self.began: float | None = None
        self.figures: dict[str, Any] = {}
        self.said = False

    def start(self) -> None:
        """A training step begins, with loading its data."""
        self.began = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.peak = self.peak or peak(args.device, args.bf16 or args.fp16)
        self.flops = Flops(kwargs["model"]) if self.peak else None

    def count(self, batch: Mapping[str, Any]) -> None:
        """A whole batch of the step, of which this rank does its part."""
        try:
            lengths = lengths_of(batch)
        except InputError:  # the forward raises it too, on all ranks
            return
        self.tokens += sum(lengths) / self.sp.size
        if self.flops is not None:
            self.done += self.flops.of(lengths) / self.sp.size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure(args, control)

    on_epoch_end = on_step_end

    def _measure(self, args: Any, control: Any) -> None:
        """All ranks come here, and know whether they will log; `on_log` may be called by one rank alone."""
        if self.began is not None:
            self.seconds += time.perf_counter() - self.began
            self.began = None
        if not control.should_log or not self.seconds:
            return
        figures = self.tokens, self.seconds, memory_gib(args.device), self.done
        mine = torch.tensor(figures, dtype=torch.float64, device="cpu")
        every = torch.empty(dist.get_world_size(), len(figures), dtype=torch.float64, device="cpu")
        dist.all_gather(list(every.unbind()), mine, group=self.sp.control_world)
        seconds = float(every[:, 1].max())
        self.figures = {
            "tokens_per_second": round(float(every[:, 0].sum()) / seconds, 1),
            "memory_gib": round(float(every[:, 2].max()), 3),
        }
        if self.peak:
            self.figures["mfu"] = round(float(every[:, 3].sum()) / (seconds * self.peak * len(every)), 4)
        if not self.said:
            self.figures |= shape(self.sp)
            self.said = True
        self.done = self.tokens = self.seconds = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            logs.update(self.figures)  # not in state.log_history: no two runs have the same, and states are compared
            self.figures = {}


def shape(sp: SequenceParallel) -> dict[str, int]:
    """How ranks share sequences, as numbers that every logging integration takes."""
    ulysses = sp.config.ulysses
    return {"sp_size": sp.size, "sp_ulysses": ulysses, "sp_inner": sp.size // ulysses, "data_groups": sp.data_size}


def memory_gib(device: torch.device) -> float:
    """The most memory that this rank has held so far: on the device; of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
