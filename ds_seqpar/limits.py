"""The largest numbers that the commands take, and why. A larger one is refused before any work.

With them each command needs less than 2 GiB and some ten seconds of one core. Limits are on what the work grows with.
"""

from __future__ import annotations

import math

from .errors import ConfigError

RANKS = 2**20  # of a job: ten times the largest cluster. Work does not grow with them, but with those of a sequence
TOKENS = 2**40  # of a sequence, or of a window: a million times what has been trained on. Work does not grow with them
COUNT = 2**20  # of sequences, or of anything else that is only multiplied
HEADS = 2**16  # of a model: of no model are there a thousand
LAYERS = 1000  # of a model: it is made without memory, which takes milliseconds a layer
EXPERTS = 10_000  # of all layers together: some families have modules for each, made like a layer's
WIDTH = 2**24  # hidden, intermediate, head_dim, vocabulary: so that no product of two overflows
# ranks of a sequence, without Ulysses', whose programs `memory` and `plan` follow: a rank's has a step for each other
FOLLOWED = 1024
OVERLAPPED = 64  # the same with overlap, which orders the products of all ranks: work grows with their cube
SHOWN = 128  # the same in `show`: a table, and a simulation, of all ranks in all steps
SHOWN_OVERLAPPED = 64
DRAWN = 64  # ranks in a picture: more cannot be told apart
DOCUMENTS = 2**14  # of a sequence: the planner deals them out anew for each shape
FRAMES = 100_000  # shapes that the planner tells apart


def check(name: str, value: int, most: int, hint: str = "") -> None:
    """Raises ConfigError for a number above its limit. hint: what to do, such as "say --set size=8"."""
    if value > most:
        got = str(value) if value < 10**18 else f"a number of {int(math.log10(value)) + 1} digits"
        raise ConfigError(f"{name} must be at most {most:,}; got {got}{hint and f', {hint}'}")


def check_followed(inner: int, overlap: bool, most: int = FOLLOWED, most_overlapped: int = OVERLAPPED) -> None:
    """The same for the ranks of a sequence without Ulysses', size / ulysses, whose programs are followed."""
    name = "size / ulysses, the ranks that run the schedule,"
    if overlap and most_overlapped < inner <= most:
        check(f"{name} with overlap", inner, most_overlapped, "leave overlap out or take fewer")
    check(name, inner, most, "take a smaller size or a larger ulysses")
