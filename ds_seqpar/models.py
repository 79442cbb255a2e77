"""Models of libraries that ds_seqpar knows how to patch. `initialize` imports the package that does it for a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import nn

from .errors import ConfigError

if TYPE_CHECKING:
    from .planner.request import Model

# a class that all of a library's models have among their bases -> the package that patches them
PACKAGES = {"PreTrainedModel": "hf_integration"}
HOW = "which is not installed; install it by pip install 'ds_seqpar[hf]'"


def library_of(model: nn.Module) -> Any:
    """The package that patches models of this kind; None for a model of one's own.

    Its functions take a model that may be inside a peft model or torch.compile. is_known: whether its attention can be
    patched. heads: its numbers of query and key/value heads. job_of: a job, with what the planner must know of the
    model. check_patch: raises where `patch_attention` would. patched_with: the SequenceParallel that it is patched
    with. check_function, check_engine: raise on every rank unless its loss is right, before and after DeepSpeed has the
    model."""
    bases = [base.__name__ for base in type(unwrapped(model)).__mro__]
    return next((imported(package) for base, package in PACKAGES.items() if base in bases), None)


def known_library(model: nn.Module) -> Any:
    """`library_of`, where it can patch the model."""
    library = library_of(model)
    return library if library is not None and library.is_known(unwrapped(model)) else None


def own_library(model: nn.Module) -> Any:
    """`library_of`. Raises ConfigError for a model of one's own."""
    if (library := library_of(model)) is None:
        raise ConfigError(
            "initialize needs a transformers model, or the SequenceParallel that your own model calls; got "
            f"{type(model).__name__} alone, pass sequence_parallel=sp"
        )
    return library


def numbers_of(place: str) -> Model:
    """What a model's memory depends on, from the folder or file of its config. Raises ConfigError for one that is none,
    or that is not known."""
    return imported(f"{PACKAGES['PreTrainedModel']}.job").numbers_of(place)


def imported(name: str) -> Any:
    """The module. Raises ConfigError where a library that it is for is not installed."""
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
