"""Log chosen, disabled and ignored settings via logging.getLogger("ds_seqpar")."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from . import compat

_logger = logging.getLogger("ds_seqpar")
_said: set[str] = set()


def log_once(message: str) -> None:
    """Log a message once per process, only on rank 0.

    The level is WARNING, which Python prints to stderr by default.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0 and message not in _said:
        _said.add(message)
        _logger.warning(message)


# in a compiled model, log_once runs during tracing
setattr(log_once, compat.CONSTANT, True)
