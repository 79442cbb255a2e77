"""The largest numbers that the commands take, and why. A larger one is refused before any work.

With them each command needs less than 2 GiB and some ten seconds of one core. Limits are on what the work grows with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .errors import ConfigError

RANKS = 2**20  # of a job: ten times the largest cluster. Work does not grow with them, but with those of a sequence
TOKENS = 2**40  # of a sequence, or of a window: a million times what has been trained on. Work does not grow with them
COUNT = 2**20  # of sequences, or of anything else that is only multiplied
SHARING = 2**16  # ranks that share a sequence: a schedule's shape may hang on all of them
HEADS = 2**12  # of a model: of no model are there a thousand
LAYERS = 1000  # of a model: it is made without memory, which takes milliseconds a layer
EXPERTS = 10_000  # of all layers together: some families have modules for each, made like a layer's
WIDTH = 2**24  # hidden, intermediate, head_dim, vocabulary: so that no product of two overflows
MEMBERS = 2**8  # of Ulysses' exchange, in `plan`: it asks which of them share a node, and that grows with their square
PLANNED = 2**14  # ranks of a sequence that `plan` looks at: it counts through them for each of a hundred candidates
# ranks of a sequence, without Ulysses', whose programs `memory` and `plan` follow: a rank's has a step for each other.
# (`memory` follows more turns of a ring than a few as those few)
FOLLOWED = 1024
OVERLAPPED = 64  # the same with overlap, which orders the products of all ranks: work grows with their cube
SHOWN = 128  # the same in `show`: a table, and a simulation, of all ranks in all steps
SHOWN_OVERLAPPED = 64
MODEL = {
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": WIDTH,
    "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH, "head_dim": WIDTH, "vocab_size": WIDTH,
}  # fmt: skip
MODEL_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
DRAWN = 64  # ranks in a picture: more cannot be told apart
DOCUMENTS = 2**12  # of a sequence: the planner deals them out anew for each shape, milliseconds for each
SHAPES = 10_000  # of schedules on all sizes and degrees: of more the planner tries one layout and placement each


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


def check_model(numbers: Mapping[str, object]) -> None:
    """The same for a model's configuration, before the model is made. What is no whole number is left to others."""
    its = {name: value for name, value in numbers.items() if isinstance(value, int)}
    for name, most in MODEL.items():
        check(name, its.get(name, 0), most)
    experts = max((its.get(name, 0) for name in MODEL_EXPERTS), default=0)
    check("experts of all layers together", its.get("num_hidden_layers", 1) * experts, EXPERTS)
