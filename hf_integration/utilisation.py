"""The flops that a training step of a model has, and those that a device could do at most: their quotient is the model
flops utilisation (MFU). What is computed again, by checkpoints or kernels, does not count."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from .families import unwrapped, windows
from .job import counted, elements

# flops/s in bf16 and fp16, without sparsity, by what the device is called. Source: NVIDIA's data sheets
PEAKS = {r"A100": 312e12, r"H100 80GB HBM3": 989e12, r"H200(?! NVL)": 989e12}


def peak(device: torch.device, half: bool) -> float | None:
    """Flops/s of a device at most, None where that is not known. half: whether it multiplies in bf16 or fp16."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and half else ""
    return next((rate for pattern, rate in PEAKS.items() if re.search(pattern, name)), None)


class Flops:
    """Of the training steps of a patched model. For each weight and token a matrix takes two in forward, two for its
    input's gradient, and two for its own, which frozen weights do not have."""

    def __init__(self, model: nn.Module) -> None:
        numbers, self.windows = counted(unwrapped(model)), windows(unwrapped(model))
        trained = [p for p in model.parameters() if p.requires_grad]
        weights = numbers.layers * (numbers.projections + numbers.mlp) + numbers.embedding
        all_trained = len(trained) == len([*model.parameters()])
        self.each_token = 6 * weights if all_trained else 4 * weights + 6 * sum(map(elements, trained))
        self.each_pair = 12 * numbers.heads * numbers.head_dim

    def of(self, lengths: Sequence[int]) -> float:
        """lengths: tokens of the documents that are trained on."""
        from ds_seqpar.planner.request import pairs_of

        pairs = sum(pairs_of(lengths, window) for window in self.windows)
        return self.each_token * sum(lengths) + self.each_pair * pairs
