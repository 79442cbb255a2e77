"""Random noise in training.

Each rank draws its own random numbers for its tokens. For whole tensors, all ranks that share a sequence draw the same
random numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ds_seqpar import SequenceParallel
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.data.random_states import OwnStream, seed_of, torch_states
from ds_seqpar.guards.mismatch_hints import RANDOM

from .compat import NEFTUNE

NUMBERS = re.compile(r".*(drop|jitter|noise).*")  # names of settings that control noise


class OwnNoise:
    """Random numbers for this rank's tokens during one forward, until `end`.

    Args:
        sp: The SequenceParallel of the model. A single rank draws like the plain model.
        model: The model.
        tokens: The number of this rank's tokens in each row.
        layout: The batch's layout, or None if sequences are divided equally.
    """

    def __init__(self, sp: SequenceParallel, model: nn.Module, tokens: int, layout: BatchLayout | None) -> None:
        self.stream = own_stream(sp) if sp.size > 1 else None
        self.neftune = {module: vars(module)[NEFTUNE] for module in model.modules() if NEFTUNE in vars(module)}
        length = tokens * sp.size if layout is None else layout.tokens // (layout.rows or 1)
        for (
            module,
            alpha,
        ) in self.neftune.items():  # NEFTune's hook divides alpha by the square root of the number of local tokens
            setattr(module, NEFTUNE, alpha * (tokens / length) ** 0.5)

    def end(self) -> list[Tensor] | None:
        """Switch back to the shared random stream and return its state, or None on a single rank."""
        for module, alpha in self.neftune.items():
            setattr(module, NEFTUNE, alpha)
        return None if self.stream is None else self.stream.end()


def own_stream(sp: SequenceParallel) -> OwnStream:
    """Start a random stream that no other rank uses."""
    return OwnStream(sp.device, sp.data_rank, sp.rank)


def drawn_since(sp: SequenceParallel, states: list[Tensor]) -> dict[str, str]:
    """Return a hash of `states` for comparison between ranks, or {} if no random numbers were drawn since then."""
    drawn = not all(map(torch.equal, states, torch_states(sp.device)))
    return {RANDOM: str(seed_of(states))} if drawn else {}


def noise_of(owner: object) -> dict[str, float]:
    """Return the floats of a config or module that control noise in training, by name."""
    return {name: x for name, x in vars(owner).items() if type(x) is float and NUMBERS.fullmatch(name)}


def noise_numbers(model: nn.Module) -> Counter[str]:
    """Count the nonzero noise settings in a model's configs and modules, by "NAME VALUE"."""
    numbers: list[tuple[str, float]] = []
    for owner in (*configs_of(model), *model.modules()):
        numbers += noise_of(owner).items()
        if isinstance(alpha := vars(owner).get(NEFTUNE), int):
            numbers.append((NEFTUNE, alpha))
        if "Dropout" in type(owner).__name__ and isinstance(p := getattr(owner, "p", None), int | float):
            numbers.append((f"{type(owner).__name__} p", p))
    return Counter(f"{name} {x}" for name, x in numbers if x > 0)


def configs_of(model: nn.Module) -> Iterator[PreTrainedConfig]:
    """Yield the config of a model and its subconfigs."""
    configs = [model.config]
    for config in configs:
        if isinstance(config, PreTrainedConfig):
            yield config
            configs += vars(config).values()
