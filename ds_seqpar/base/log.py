"""Log chosen, disabled and ignored settings through logging.getLogger("ds_seqpar")."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from . import compat

_logger = logging.getLogger("ds_seqpar")
_said: set[str] = set()


def log_once(message: str) -> None:
    """Log a message once per process, on rank 0 only, as a WARNING, which Python prints to stderr by default."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0 and message not in _said:
        _said.add(message)
        _logger.warning(message)


# in a compiled model, log_once runs during tracing
setattr(log_once, compat.CONSTANT, True)
