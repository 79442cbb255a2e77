"""The names of hf_integration under their module of version 0.1, which goes in 0.3."""

from typing import Any

from . import renamed
from .models import PACKAGES, imported

_library = imported(PACKAGES["PreTrainedModel"])
renamed.warn("module", "ds_seqpar.hf", repr(_library.__name__))
__all__ = [*_library.__all__]


def __getattr__(name: str) -> Any:
    return getattr(_library, name)
