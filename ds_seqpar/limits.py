"""The largest numbers that the commands take, and why. A larger one is refused before any work.

Within these limits each command needs less than 2 GiB and some ten seconds of one core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .errors import ConfigError

RANKS = 2**20  # of a job: ten times the largest cluster. Work grows with the ranks of a sequence, not with these
TOKENS = 2**40  # of a sequence, or of a window: a million times what has been trained on. Work does not grow with them
COUNT = 2**20  # of sequences, or of anything else that is only multiplied
SHARING = 2**16  # ranks that share a sequence: a schedule's shape may depend on all of them
HEADS = 2**12  # of a model: no model has a thousand
LAYERS = 1000  # of a model: transformers makes it without memory, in milliseconds a layer
EXPERTS = 10_000  # of all layers together: some families make a module for each
WIDTH = 2**24  # hidden size, intermediate size, head_dim, vocabulary: no product of two overflows
MEMBERS = 2**8  # of a Ulysses group, in `plan`: it compares the nodes of every pair of members
PLANNED = 2**14  # ranks of a sequence, in `plan`: it visits all of them for each of a hundred candidates
# inner ranks (size / ulysses), in `memory` and `plan`: a rank's program has a step for each other one. `memory`
# replaces a long ring by a short one that needs as much memory
FOLLOWED = 1024
OVERLAPPED = 64  # inner ranks with overlap: ordering their products takes time that grows with their cube
SHOWN = 128  # inner ranks, in `show`: it prints and simulates all ranks in all steps
SHOWN_OVERLAPPED = 64
MODEL = {
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": WIDTH,
    "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH, "head_dim": WIDTH, "vocab_size": WIDTH,
}  # fmt: skip
MODEL_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
DRAWN = 64  # ranks in a picture: more could not be distinguished
DOCUMENTS = 2**12  # of a sequence: the planner deals them to ranks anew for each shape, in milliseconds for each
SHAPES = 10_000  # of schedules on all sizes and Ulysses degrees: of more, `plan` tries one layout and placement each


def check(name: str, value: int, most: int, hint: str = "") -> None:
    """Raises ConfigError for a number above its limit. hint: what to do, such as "say --set size=8"."""
    if value > most:
        got = str(value) if value < 10**18 else f"a number of {int(math.log10(value)) + 1} digits"
        raise ConfigError(f"{name} must be at most {most:,}; got {got}{hint and f', {hint}'}")


def check_followed(inner: int, overlap: bool, most: int = FOLLOWED, most_overlapped: int = OVERLAPPED) -> None:
    """Raises ConfigError for more inner ranks (size / ulysses) than `most`, or with overlap than `most_overlapped`."""
    name = "size / ulysses, the ranks that run the schedule,"
    if overlap and most_overlapped < inner <= most:
        check(f"{name} with overlap", inner, most_overlapped, "leave overlap out or take fewer")
    check(name, inner, most, "take a smaller size or a larger ulysses")


def check_model(numbers: Mapping[str, object]) -> None:
    """Raises ConfigError for a model's configuration with a number above its limit, before the model is made. Values
    that are not whole numbers are not checked here."""
    sizes = {name: value for name, value in numbers.items() if isinstance(value, int)}
    for name, most in MODEL.items():
        check(name, sizes.get(name, 0), most)
    experts = max((sizes.get(name, 0) for name in MODEL_EXPERTS), default=0)
    check("experts of all layers together", sizes.get("num_hidden_layers", 1) * experts, EXPERTS)
