"""The number of bytes that a stateful layer sends and keeps on a rank.

This module does not import torch.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from ..core.compiler.program.shape import ITEMSIZE
from ..core.compiler.sharding.layout import multiple
from ..core.compiler.sharding.shards import EvenShards, Shards
from ..data.balance import shards_of
from ..operators.segments import received_bytes, segments_of
from .attention_memory import tokens_on_rank
from .request import TrainingStep


class StateBytes(NamedTuple):
    """Bytes for one layer on the rank that needs the most memory."""

    received: int = 0  # received states and their maps, per direction
    exchanged: int = 0  # tokens exchanged for other heads in the forward pass, including output tokens
    entering: int = 0  # states at the start of the rank's runs, which checkpoints keep
    saved: int = 0  # saved for the backward pass, excluding tensors that the layer's own function saves


def state_bytes(step: TrainingStep) -> StateBytes:
    """Return the bytes for a stateful layer, using the configured way of sharing its states or the cheaper way if none
    is configured.

    Raises:
        ConfigError: A rank's tokens are not consecutive.
    """
    layers, config = step.model.states, step.config
    if layers is None:
        return StateBytes()
    rows, ulysses, size = tokens_on_rank(step) * step.batch, config.ulysses, ITEMSIZE[step.dtype]
    sums, numbers = max(4, size), layers.keys * layers.values
    saved = rows * layers.kept * size
    if not layers.heads:
        return StateBytes(saved=saved)
    lengths = tuple(b - a for a, b in itertools.pairwise((*step.mask.documents, step.seq)))
    whole = step.batch * layers.heads * sums  # size in bytes of one number per head's state
    of_ways = []
    for exchanges in (True, False):
        ranks, share = (None, whole // ulysses) if exchanges else (ulysses, whole)
        reach, local = _runs(config.layout, lengths, config.size // ulysses, ulysses, ranks)
        exchanged = rows * layers.exchanged * size * (ulysses - 1) // ulysses if exchanges else 0
        readout = rows * layers.heads * layers.keys * sums if reach else 0  # maps the state to the output
        received = received_bytes(reach, local, share * numbers, share * layers.transition)
        of_ways.append(StateBytes(int(received), exchanged, local * share * numbers if reach else 0, saved + readout))
    heads, states = of_ways
    if config.recurrent_layers == "states" or layers.heads % ulysses:
        return states
    fewer = heads.received + heads.exchanged < states.received
    return heads if config.recurrent_layers == "heads" or fewer else states


@functools.lru_cache(maxsize=256)
def _runs(layout: str, lengths: tuple[int, ...], cp_size: int, ulysses: int, ranks: int | None) -> tuple[int, int]:
    """Return how many previous runs a run depends on, and the maximum number of runs on a rank."""
    documents = tuple(itertools.accumulate(lengths[:-1], initial=0)) if lengths else ()
    # the length does not matter
    shards: Shards = EvenShards(layout, 4 * multiple(layout, cp_size * ulysses, ulysses), cp_size)
    segments = segments_of(shards_of(layout, lengths, cp_size) if lengths else shards, documents, ranks)
    return segments.reach() if segments.continues else 0, segments.most_runs
