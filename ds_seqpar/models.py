"""Libraries of models that ds_seqpar knows how to patch. The package that does it registers itself when it is imported.
`initialize` imports the package that a model needs, and knows no more of it than a Library says."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from .errors import ConfigError
from .parallel import SequenceParallel

if TYPE_CHECKING:
    from .planner.auto import Job
    from .planner.request import Model

# a class that all of a library's models have among their bases -> the package that registers it
PACKAGES = {"PreTrainedModel": "hf_integration"}
HOW = "which is not installed; install it by pip install 'ds_seqpar[hf]'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """What is done with its models. A model may also be inside a peft model or torch.compile.

    is_known: whether its attention can be patched. heads: its numbers of query and key/value heads. job: the same with
    what the planner must know of the model, as far as it can be known. check_patch: raises where `patch` would.
    patched_with: the SequenceParallel that it is patched with. check_loss, check_engine: raise on every rank unless its
    loss is right, before and after DeepSpeed has the model.
    """

    is_known: Callable[[Any], bool]
    heads: Callable[[Any], tuple[int, int]]
    job: Callable[[Any, Job], Job]
    check_patch: Callable[[Any, SequenceParallel | None], None]
    patch: Callable[[Any, SequenceParallel], Any]
    patched_with: Callable[[Any], SequenceParallel | None]
    check_loss: Callable[[nn.Module, SequenceParallel], None]
    check_engine: Callable[[nn.Module, SequenceParallel], None]


_registered: dict[str, Library] = {}


def register(base: str, library: Library) -> None:
    """For models with a class of that name among their bases."""
    _registered[base] = library


def library_of(model: nn.Module) -> Library | None:
    """The library that the model belongs to; None for a model of one's own."""
    for base in type(unwrapped(model)).__mro__:
        if base.__name__ in PACKAGES and base.__name__ not in _registered:
            imported(PACKAGES[base.__name__])
        if base.__name__ in _registered:
            return _registered[base.__name__]
    return None


def known_library(model: nn.Module) -> Library | None:
    """`library_of`, where it can patch the model."""
    library = library_of(model)
    return library if library is not None and library.is_known(unwrapped(model)) else None


def own_library(model: nn.Module) -> Library:
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
