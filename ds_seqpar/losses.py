"""The loss of an optimiser step, from the parts of it that ranks see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import InputError
from .runtime.agreement import agree, sums


def mean_of(world: dist.ProcessGroup, given: object) -> tuple[float, Tensor]:
    """The mean over all ranks of the losses that each was given, in double precision, and that of this rank's own, in
    their dtype, which autograd follows. Collective; raises InputError or DisagreementError on all ranks."""
    losses, error = _losses(given)
    own = torch.zeros((), device="cpu") if error else torch.stack([loss.reshape(()) for loss in losses]).mean()
    exact = 0.0 if error else float(torch.stack([x.detach().double().cpu().reshape(()) for x in losses]).mean())
    agree(world, "losses", {"number of losses": len(losses)}, error=error, call="mean_loss")
    return sums(world, [exact], "mean_loss")[0] / dist.get_world_size(), own


def _losses(given: object) -> tuple[list[Tensor], InputError | None]:
    wanted = (
        "mean_loss needs what the model returned as loss, a floating point tensor of one element, or a list of such"
    )
    losses: list[Any] = list(given) if isinstance(given, Iterable) and getattr(given, "dim", lambda: 1)() else [given]
    if not losses:
        return losses, InputError(f"{wanted}; got none")
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            return losses, InputError(f"{wanted}; got {what}")
    return losses, None
