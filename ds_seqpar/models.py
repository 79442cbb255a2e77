"""Models of libraries that ds_seqpar can patch. `initialize` imports the package that patches a model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from .base.compat import compiled_module
from .base.errors import ConfigError

if TYPE_CHECKING:
    from .planning import Job, Model

# a class that all of a library's models have among their bases -> the package that patches them
PACKAGES = {"PreTrainedModel": "hf_integration"}
HOW = "which is not installed; install it by pip install 'ds_seqpar[hf]'"


class ModelPatcher(Protocol):
    """The interface of a package that patches models of one library, such as hf_integration.

    Models may be inside a peft model or torch.compile. sp is a SequenceParallel.
    """

    def is_known(self, model: Any) -> bool:
        """Return whether the model's attention can be patched."""

    def heads(self, model: Any) -> tuple[int, int]:
        """Return (query heads, key/value heads)."""

    def job_of(self, model: Any, job: Job) -> Job:
        """Return the job with the model's sizes."""

    def check_patch(self, model: Any, sp: Any) -> None:
        """Raise the errors that patch_attention would raise."""

    def patched_with(self, model: Any) -> Any:
        """Return the SequenceParallel that a model is patched with, or None."""

    def packing(self, model: Any) -> Packing:
        """Return what packs must know about a patched model."""

    def patch_attention(self, model: Any, sp: Any) -> Any:
        """Run the model's attention on sp. Return the model."""

    def trust_loss(self, model: Any) -> None:
        """Skip the check of a patched model's loss in its forwards."""

    def log_probs(self, sp: Any, model: Any, input_ids: Any, **how: Any) -> Any:
        """Return the same as `SequenceParallel.log_probs`."""

    def check_function(self, model: Any, sp: Any) -> None:
        """Raise on every rank unless the model's loss is right, before DeepSpeed receives the model."""

    def check_engine(self, engine: Any, sp: Any) -> None:
        """Check the loss in the first forward of an engine's model, and that it calls sp.attention."""


class Packing(Protocol):
    """What packs must know about a model."""

    def job_of(self, job: Job) -> Job:
        """Return the job with the model's sizes. Raises ConfigError if its loss is not a sum over tokens."""

    def media_of(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a sample that have no per-token entries. Raises if the model cannot take them."""

    def positions_of(self, document: Mapping[str, Any]) -> Any:
        """Return the positions of a document's tokens, int64 (axes, 1, tokens). The first axis counts the tokens."""

    def joined(self, media: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the results of `media_of` for several documents into the inputs of one pack."""


def patcher_of_class(model: nn.Module) -> ModelPatcher | None:
    """Return the package for models of this class, whether or not it supports the family; None for a custom class."""
    bases = [base.__name__ for base in type(unwrapped(model)).__mro__]
    return next((imported(package) for base, package in PACKAGES.items() if base in bases), None)


def patcher_if_known(model: nn.Module) -> ModelPatcher | None:
    """Return the package that supports this model's family, and so can patch it; None if none does."""
    patcher = patcher_of_class(model)
    return patcher if patcher is not None and patcher.is_known(unwrapped(model)) else None


def required_patcher(model: nn.Module) -> ModelPatcher:
    """Return `patcher_of_class`. Raises ConfigError for a custom class."""
    if (patcher := patcher_of_class(model)) is None:
        raise ConfigError(
            "initialize needs a transformers model, or the SequenceParallel that your own model calls; got "
            f"{type(model).__name__} alone, pass sequence_parallel=sp"
        )
    return patcher


def numbers_of(place: str) -> Model:
    """Return the sizes of a model, from its config's folder or file. Raises ConfigError for any other file and for an
    unknown family.
    """
    return imported(f"{PACKAGES['PreTrainedModel']}.look.sizes").numbers_of(place)


def random_model(place: str) -> Any:
    """Return a model with random weights, for the configuration that `numbers_of` reads. Raises the same errors."""
    return imported(f"{PACKAGES['PreTrainedModel']}.look.sizes").random_model(place)


def doctor_of_models() -> Any:
    """Return the module with the doctor's checks of models. Raises ConfigError if transformers is not installed."""
    return imported(f"{PACKAGES['PreTrainedModel']}.doctor.checks")


def imported(name: str) -> Any:
    """Import a module. Raises ConfigError if it needs transformers or accelerate and that is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in ("transformers", "accelerate"):
            raise ConfigError(f"models of HuggingFace need {error.name}, {HOW}") from error
        raise


def unwrapped(model: nn.Module) -> Any:
    """Return the model inside a peft model, torch.compile, DDP or an engine; any other model as it is."""
    names = {base.__name__ for base in type(model).__mro__}
    inside: Any = model
    if "OptimizedModule" in names:
        return unwrapped(compiled_module(inside))
    if names & {"DeepSpeedEngine", "DistributedDataParallel"}:
        return unwrapped(inside.module)
    return unwrapped(inside.get_base_model()) if "PeftModel" in names else model
