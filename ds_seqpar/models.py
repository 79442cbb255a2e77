"""Support for models from other libraries that ds_seqpar can patch. The patching package is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from .base.compat import compiled_module
from .base.errors import ConfigError

if TYPE_CHECKING:
    from .planning import Job, Model

# the package that patches a library's models, by the models' common base class
PACKAGES = {"PreTrainedModel": "hf_integration"}
HOW = "which is not installed; install it by pip install 'ds_seqpar[hf]'"


class ModelPatcher(Protocol):
    """The interface of a package that patches one library's models, such as hf_integration.

    Models may be inside a peft model or torch.compile. `sp` is a SequenceParallel.
    """

    def is_known(self, model: Any) -> bool:
        """Return whether the model's attention can be patched."""

    def heads(self, model: Any) -> tuple[int, int]:
        """Return the model's (query heads, key/value heads)."""

    def job_of(self, model: Any, job: Job) -> Job:
        """Return the job, completed with the model's sizes."""

    def check_patch(self, model: Any, sp: Any) -> None:
        """Raise the errors that `patch_attention` would raise, without patching."""

    def patched_with(self, model: Any) -> Any:
        """Return the SequenceParallel with which a model is patched, or None."""

    def packing(self, model: Any) -> Packing:
        """Return an object with the model-specific functions for packs."""

    def patch_attention(self, model: Any, sp: Any) -> Any:
        """Make the model compute attention through `sp`, and return the model."""

    def trust_loss(self, model: Any) -> None:
        """Skip checking a patched model's loss in forward passes."""

    def log_probs(self, sp: Any, model: Any, input_ids: Any, **how: Any) -> Any:
        """Compute `SequenceParallel.log_probs`."""

    def check_function(self, model: Any, sp: Any) -> None:
        """Raise on every rank if the model computes a wrong loss, before DeepSpeed receives the model."""

    def check_engine(self, engine: Any, sp: Any) -> None:
        """Check in an engine's first forward pass that the loss is correct and that the model calls `sp.attention`."""


class Packing(Protocol):
    """Model-specific functions for packs."""

    def job_of(self, job: Job) -> Job:
        """Return the job, completed with the model's sizes. Raise ConfigError if the model's loss is not a sum over
        tokens.
        """

    def media_of(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample's inputs that have no entry per token. Raise an error for unsupported inputs."""

    def positions_of(self, document: Mapping[str, Any]) -> Any:
        """Return the positions of a document's tokens, int64 (axes, 1, tokens).

        The first axis counts the document's tokens.
        """

    def joined(self, media: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the media of several documents into the inputs for one pack."""


def patcher_of_class(model: nn.Module) -> ModelPatcher | None:
    """Return the package for models of this class, or None. The package may still not support the model's family."""
    bases = [base.__name__ for base in type(unwrapped(model)).__mro__]
    return next((imported(package) for base, package in PACKAGES.items() if base in bases), None)


def patcher_if_known(model: nn.Module) -> ModelPatcher | None:
    """Return the package that can patch a model of this family, or None."""
    patcher = patcher_of_class(model)
    return patcher if patcher is not None and patcher.is_known(unwrapped(model)) else None


def required_patcher(model: nn.Module) -> ModelPatcher:
    """Return the result of `patcher_of_class`. Raise ConfigError for a custom class."""
    if (patcher := patcher_of_class(model)) is None:
        raise ConfigError(
            "initialize needs a transformers model, or the SequenceParallel that your own model calls; got "
            f"{type(model).__name__} alone, pass sequence_parallel=sp"
        )
    return patcher


def numbers_of(place: str) -> Model:
    """Return the sizes of the model whose config is in a folder or file.

    Raises:
        ConfigError: The file is not a model's config, or the model family is unknown.
    """
    return imported(f"{PACKAGES['PreTrainedModel']}.look.sizes").numbers_of(place)


def random_model(place: str) -> Any:
    """Return a randomly initialized model for a config that `numbers_of` accepts. See `numbers_of` for errors."""
    return imported(f"{PACKAGES['PreTrainedModel']}.look.sizes").random_model(place)


def doctor_of_models() -> Any:
    """Return the module with the doctor's model checks. Raise ConfigError if transformers is not installed."""
    return imported(f"{PACKAGES['PreTrainedModel']}.doctor.checks")


def imported(name: str) -> Any:
    """Import a module.

    Raise ConfigError if the module needs transformers or accelerate and the required library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in ("transformers", "accelerate"):
            raise ConfigError(f"models of HuggingFace need {error.name}, {HOW}") from error
        raise


def unwrapped(model: nn.Module) -> Any:
    """Return the model inside a peft model, torch.compile, DDP or an engine. Return any other model unchanged."""
    names = {base.__name__ for base in type(model).__mro__}
    inside: Any = model
    if "OptimizedModule" in names:
        return unwrapped(compiled_module(inside))
    if names & {"DeepSpeedEngine", "DistributedDataParallel"}:
        return unwrapped(inside.module)
    return unwrapped(inside.get_base_model()) if "PeftModel" in names else model
