"""Models of libraries that ds_seqpar knows how to patch. `initialize` imports the package that does it for a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from .errors import ConfigError

if TYPE_CHECKING:
    from .auto import Job, Model

# a class that all of a library's models have among their bases -> the package that patches them
PACKAGES = {"PreTrainedModel": "hf_integration"}
HOW = "which is not installed; install it by pip install 'ds_seqpar[hf]'"


class ModelPatcher(Protocol):
    """A package that patches models of one library. Models may be inside a peft model or torch.compile; sp is a
    SequenceParallel.

    is_known: whether the model's attention can be patched. heads: (query heads, key/value heads). job_of: the job with
    the model's sizes. check_patch: raises where patch_attention would. patched_with: the SequenceParallel that a model
    is patched with. trust_loss: a patched model's forwards try its loss no more. check_function, check_engine: raise on
    every rank unless the model's loss is right, before and after DeepSpeed has the model."""

    def is_known(self, model: Any) -> bool: ...
    def heads(self, model: Any) -> tuple[int, int]: ...
    def job_of(self, model: Any, job: Job) -> Job: ...
    def check_patch(self, model: Any, sp: Any) -> None: ...
    def patched_with(self, model: Any) -> Any: ...
    def patch_attention(self, model: Any, sp: Any) -> Any: ...
    def trust_loss(self, model: Any) -> None: ...
    def check_function(self, model: Any, sp: Any) -> None: ...
    def check_engine(self, engine: Any, sp: Any) -> None: ...


def patcher_of_class(model: nn.Module) -> ModelPatcher | None:
    """The package for models of this class, whether or not it knows the family; None for a user's own class."""
    bases = [base.__name__ for base in type(unwrapped(model)).__mro__]
    return next((imported(package) for base, package in PACKAGES.items() if base in bases), None)


def patcher_if_known(model: nn.Module) -> ModelPatcher | None:
    """The package that can patch this model, since it knows its family; None where none does."""
    patcher = patcher_of_class(model)
    return patcher if patcher is not None and patcher.is_known(unwrapped(model)) else None


def required_patcher(model: nn.Module) -> ModelPatcher:
    """As `patcher_of_class`, but raises ConfigError for a user's own class."""
    if (patcher := patcher_of_class(model)) is None:
        raise ConfigError(
            "initialize needs a transformers model, or the SequenceParallel that your own model calls; got "
            f"{type(model).__name__} alone, pass sequence_parallel=sp"
        )
    return patcher


def numbers_of(place: str) -> Model:
    """The sizes of a model, from the folder or the file of its config. Raises ConfigError for another file, and for a
    family that is not known."""
    return imported(f"{PACKAGES['PreTrainedModel']}.trainer.job").numbers_of(place)


def imported(name: str) -> Any:
    """The imported module. Raises ConfigError where transformers or accelerate, which it needs, is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in ("transformers", "accelerate"):
            raise ConfigError(f"models of HuggingFace need {error.name}, {HOW}") from error
        raise


def unwrapped(model: nn.Module) -> Any:
    """The model inside a peft model, torch.compile, DDP or an engine; any other model as it is."""
    names = {base.__name__ for base in type(model).__mro__}
    inside: Any = model
    if "OptimizedModule" in names:
        return unwrapped(inside._orig_mod)
    if names & {"DeepSpeedEngine", "DistributedDataParallel"}:
        return unwrapped(inside.module)
    return unwrapped(inside.get_base_model()) if "PeftModel" in names else model
