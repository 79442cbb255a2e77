"""Sequence parallelism for HuggingFace transformers: `patch_attention(model, sp)` and a Trainer."""

import os
import warnings
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.data.packing import PackingCollator, Packs
from ds_seqpar.deepspeed.cpu_launch import op_lock as op_lock
from ds_seqpar.guards.process_exit import LIBRARIES
from ds_seqpar.models import HOW, imported

try:
    import transformers
    from transformers import PreTrainedModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"hf_integration needs {error.name}, {HOW}", name=error.name) from error

from .accelerators import share_accelerator
from .look.known import heads
from .look.known import is_known as is_known
from .model.log_probs import log_probs as log_probs
from .model.losses import check_function as check_function
from .model.patch import check_engine as check_engine
from .model.patch import check_patch, patch_attention, patched_with, share_sequences, unpatch_attention, whole_sequences
from .model.patch import trust_loss as trust_loss
from .trainer.job import job_of
from .trainer.samples import packing as packing

if TYPE_CHECKING:
    from .loaders import prepare_loader
    from .trainer.callback import SequenceParallelCallback
    from .trainer.trainer import SequenceParallelMixin, SequenceParallelTrainer

# The oldest and newest supported transformers versions (major, minor). `make test-all` tests both, and setup.cfg
# requires the same range.
OLDEST, NEWEST = (5, 18), (5, 23)
LATER = {
    "SequenceParallelCallback": "trainer.callback",
    "SequenceParallelMixin": "trainer.trainer",
    "SequenceParallelTrainer": "trainer.trainer",
    "prepare_loader": "loaders",
}

LIBRARIES.add(os.path.dirname(__file__) + os.sep)
for method in (patch_attention, unpatch_attention):
    setattr(PreTrainedModel, method.__name__, method)

__all__ = [
    "PackingCollator",
    "Packs",
    "SequenceParallelCallback",
    "SequenceParallelMixin",
    "SequenceParallelTrainer",
    "check_patch",
    "heads",
    "job_of",
    "patch_attention",
    "patched_with",
    "prepare_loader",
    "share_accelerator",
    "share_sequences",
    "unpatch_attention",
    "whole_sequences",
]


def check_transformers(version: str) -> None:
    """Raise ConfigError if transformers is too old, and warn on one rank if it is newer than tested."""
    release = Version(version).release[:2]
    tested = f"transformers {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    if release < OLDEST:
        raise ConfigError(f"SequenceParallelTrainer needs {tested}; got {version}, install one of them")
    if release > NEWEST and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"SequenceParallelTrainer is tested with {tested}, got {version}: compare a short run with the plain "
            "Trainer's before you trust it",
            stacklevel=3,
        )


def __getattr__(name: str) -> Any:
    """Import Trainer classes on first access, because transformers' Trainer takes seconds to import."""
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "prepare_loader":
        check_transformers(transformers.__version__)
    return getattr(imported(f"{__name__}.{LATER[name]}"), name)
