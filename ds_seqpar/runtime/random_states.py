"""The random state of a rank: Python's, NumPy's, torch's and its GPU's."""

from __future__ import annotations

import random

import numpy as np
import torch


def random_state() -> tuple:
    """Return the state of this rank's random generators."""
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device


def set_random_state(state: tuple) -> None:
    """Set the state of this rank's random generators to one of `random_state`."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[3])
