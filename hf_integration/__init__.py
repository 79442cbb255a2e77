"""ds_seqpar in HuggingFace transformers: `patch_attention(model, sp)`, a method of every model too, and a Trainer."""

from typing import Any

from ds_seqpar.models import HOW, Library, imported, register

try:
    import transformers
    from transformers import PreTrainedModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"hf_integration needs {error.name}, {HOW}", name=error.name) from error

from .families import heads, is_known
from .job import job_of
from .loss_checks import check_engine, check_function
from .patch import check_patch, patch_attention, patched_with, share_sequences, unpatch_attention, whole_sequences
from .versions import check_transformers

LATER = {
    "Packs": "collator",
    "PackingCollator": "collator",
    "SequenceParallelCallback": "callback",
    "SequenceParallelMixin": "trainer",
    "SequenceParallelTrainer": "trainer",
    "prepare_loader": "loaders",
}

for method in (patch_attention, unpatch_attention):
    setattr(PreTrainedModel, method.__name__, method)
register(
    "PreTrainedModel",
    Library(
        is_known=is_known,
        heads=heads,
        job=job_of,
        check_patch=check_patch,
        patch=patch_attention,
        patched_with=patched_with,
        check_loss=check_function,
        check_engine=check_engine,
    ),
)

__all__ = [
    "check_patch",
    "heads",
    "job_of",
    "patch_attention",
    "patched_with",
    "share_sequences",
    "unpatch_attention",
    "whole_sequences",
    *sorted(LATER),
]


def __getattr__(name: str) -> Any:
    """The Trainer's side, imported when it is first asked for: transformers' Trainer takes seconds to import."""
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "prepare_loader":
        check_transformers(transformers.__version__)
    return getattr(imported(f"{__name__}.{LATER[name]}"), name)
