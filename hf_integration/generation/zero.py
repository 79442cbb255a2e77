"""Parameters of a model that generates under ZeRO-3, which stores only a part of each parameter on each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import psutil
import torch
from torch import nn

from ds_seqpar.base.hosts import ranks_per_node
from ds_seqpar.base.log import log_once

from ..compat import ZERO_ID, has_zero_hooks, is_fetching, is_missing, whole_numel, without_zero_hooks

SHARE = 0.5  # fraction of free memory for gathered parameters; forwards and the cache need the rest


def split_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a model's forward gathers from other ranks and then releases."""
    parameters = [x for x in model.parameters() if hasattr(x, ZERO_ID)]
    return parameters if has_zero_hooks(model) or any(map(is_missing, parameters)) else []


def fits(parameters: Sequence[nn.Parameter], device: torch.device) -> bool:
    """Return whether this rank has enough free memory to store all given parameters at once."""
    needed = sum(whole_numel(x) * x.element_size() for x in parameters if is_missing(x))
    return needed <= SHARE * _free(device) and not any(map(is_fetching, parameters))


def _free(device: torch.device) -> int:
    """Return this rank's free memory in bytes."""
    if device.type == "cpu":
        return psutil.virtual_memory().available // ranks_per_node(1)
    memory = torch.get_device_module(device)
    return memory.mem_get_info(device)[0] + memory.memory_reserved(device) - memory.memory_allocated(device)


@contextlib.contextmanager
def parameters_of(model: nn.Module, parameters: Sequence[nn.Parameter], gather: bool) -> Iterator[None]:
    """Context manager that makes ZeRO-3 parameters available while the model generates.

    Args:
        parameters: The result of `split_parameters`.
        gather: Whether to gather the parameters once on entry, instead of in each forward. All ranks must pass the same
            value.
    """
    if not parameters or not gather:
        if parameters:
            log_once("sequence_parallel: generate fetches parameters in each forward, since all of them do not fit")
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    log_once("sequence_parallel: generate gathers the parameters once for each generation")
    with GatheredParameters([x for x in parameters if is_missing(x)]), without_zero_hooks(model):
        yield
