"""A rank's random states in Python, NumPy, torch and on its GPU, and random numbers for the rank's own tokens.

torch's default generators are the shared stream, from which all ranks that share a sequence draw the same numbers for
whole tensors. While a rank processes its own tokens, the default generators use the rank's own stream, which is seeded
from the shared state and the rank number. `torch.manual_seed` therefore sets both streams, and saving the shared state
saves both streams.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..base.fingerprint import Fingerprint


def random_state() -> tuple:
    """Return the states of this rank's random number generators."""
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device


def set_random_state(state: tuple) -> None:
    """Restore random states that `random_state` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[3])


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Restore the random states on exit from the context."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generators for the CPU and a device."""
    if device.type == "cpu":
        return [torch.default_generator]
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return [torch.default_generator, module.default_generators[index]]


def torch_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's default generators for the CPU and a device."""
    return [generator.get_state() for generator in generators(device)]


def seed_of(states: list[Tensor], *ranks: int) -> int:
    """Return a seed that is derived from the random states and differs between ranks."""
    return Fingerprint.of(*(state.numpy().tobytes() for state in states), *ranks)


class OwnStream:
    """Switch torch to this rank's own random stream until `end` is called.

    Args:
        device: Device of the rank.
        ranks: Numbers that identify the rank.
    """

    def __init__(self, device: torch.device, *ranks: int) -> None:
        self.device, self.shared = device, torch_states(device)
        for generator in generators(device):
            generator.manual_seed(seed_of(self.shared, *ranks))
        self.first = torch_states(device)

    def end(self) -> list[Tensor]:
        """Switch back to the shared stream.

        Returns:
            The state of the shared stream, advanced if numbers were drawn from the rank's own stream.
        """
        # compare bytes, since torch cannot compare values of fake tensors
        first, last = ([bytes(state.numpy()) for state in states] for states in (self.first, torch_states(self.device)))
        for generator, state in zip(generators(self.device), self.shared, strict=True):
            generator.set_state(state)
        if first != last:  # the next stream must differ from this one
            torch.empty((), device="cpu").uniform_()
        return torch_states(self.device)
