"""`hf_integration` by another name: `from ds_seqpar.hf import SequenceParallelTrainer`. It has the same names, and is
loaded by the one module that knows it."""

from typing import Any

from .models import PACKAGES, imported

_library = imported(PACKAGES["PreTrainedModel"])
__all__ = [*_library.__all__]


def __getattr__(name: str) -> Any:
    return getattr(_library, name)
