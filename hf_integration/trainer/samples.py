"""Model properties needed for packs of samples, which are the loss and inputs other than tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_seqpar.base.errors import ConfigError

from ..families import is_of_library, patch_of, unwrapped
from ..inputs import MEDIA
from ..look.look import divides_by_items
from ..look.media import joined
from ..model.media import checked
from .job import job_of

if TYPE_CHECKING:
    from ds_seqpar.planner.request import Job

AXES_OF = "get_rope_index"  # the name of the transformers method that assigns positions on several axes


class Packing:
    """The implementation of `ds_seqpar.models.Packing` for transformers models."""

    joined = staticmethod(joined)

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)

    def job_of(self, job: Job) -> Job:
        patch, has_own = patch_of(self.model), is_of_library(type(self.model).forward)
        if patch is not None and (patch.above or patch.stack) and has_own and not divides_by_items(self.model):
            raise ConfigError(
                "packs need a loss that is the sum of token losses over num_items_in_batch; got that of a "
                f"{type(self.model).__name__}, leave tokens_per_rank out"
            )
        return job_of(self.model, job)

    def media_of(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        patch = patch_of(self.model)
        if patch is not None and (error := checked(patch.facts, sample, self.model.config)[1]):
            raise error
        return {name: sample[name] for name in MEDIA if sample.get(name) is not None}

    def positions_of(self, document: Mapping[str, Any]) -> Tensor:
        return positions_of(self.model, document)


def packing(model: nn.Module) -> Packing:
    return Packing(model)


def positions_of(model: PreTrainedModel, document: Mapping[str, Any]) -> Tensor:
    """Return the positions of a document's tokens within a pack, int64 (axes, 1, tokens).

    The first axis counts the document's tokens, so that each document starts at 0. The result has further axes if
    the model assigns positions on several axes.

    Args:
        model: The unwrapped model.
        document: The forward's inputs for this document alone, as one row without padding.
    """
    ids = document["input_ids"]
    counted = torch.arange(ids.shape[1], device=ids.device).expand(1, 1, -1)
    if (owner := next((module for module in model.modules() if hasattr(module, AXES_OF)), None)) is None:
        return counted
    names = inspect.signature(method := getattr(owner, AXES_OF)).parameters
    given = {"attention_mask": torch.ones_like(ids), **document}  # required by Qwen3-Omni
    axes = method(**{name: x for name, x in given.items() if name in names})[0].long()
    return axes if len(axes) > 3 else torch.cat([counted, axes])
