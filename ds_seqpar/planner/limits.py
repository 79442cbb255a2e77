"""The largest numbers that the commands accept, and why. A larger one is refused before any work.

Within these limits each command needs less than 2 GiB and some ten seconds of one core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import ConfigError

# ranks of a job: ten times the largest cluster. Work grows with the ranks of a sequence, not with these
MAX_RANKS = 2**20
# tokens of a sequence, or of a window: a million times what has been trained on. Work does not grow with them
MAX_TOKENS = 2**40
MAX_COUNT = 2**20  # sequences, or anything else that is only multiplied
MAX_SHARING_RANKS = 2**16  # ranks that share a sequence: a schedule's shape may depend on all of them
MAX_HEADS = 2**12  # heads of a model: no model has a thousand
MAX_LAYERS = 1000  # layers of a model: transformers makes it without memory, in milliseconds a layer
MAX_EXPERTS = 10_000  # experts of all layers together: some families make a module for each
MAX_WIDTH = 2**24  # hidden size, intermediate size, head_dim or vocabulary: no product of two overflows
MAX_ULYSSES = 2**8  # Ulysses ranks of a Ulysses group, in `plan`: it compares the nodes of every pair of Ulysses ranks
MAX_PLANNED_RANKS = 2**14  # ranks that share a sequence, in `plan`: it visits all for each of a hundred candidates
# CP ranks (size / ulysses), in `memory` and `plan`: a rank's program has a step for each other CP rank. Of a
# longer ring `memory` computes a short one in its place, which needs as much memory
MAX_CP_RANKS = 1024
MAX_OVERLAP_RANKS = 64  # CP ranks with overlap: ordering their products takes time that grows with their cube
MAX_SHOWN_RANKS = 128  # CP ranks, in `show`: it prints and simulates all ranks in all steps
MAX_SHOWN_OVERLAP_RANKS = 64  # the same, with overlap
MAX_DRAWN_RANKS = 64  # CP ranks in a picture: more could not be told apart
# documents of a sequence: the planner distributes them over ranks for each shape, which takes milliseconds a document
MAX_DOCUMENTS = 2**12
# shapes of schedules, over all sizes and Ulysses sizes: if there are more, `plan` tries one layout and one rank order
# for each
MAX_SHAPES = 10_000
MODEL = {  # field of a model's configuration -> its limit
    "num_hidden_layers": MAX_LAYERS, "num_attention_heads": MAX_HEADS, "num_key_value_heads": MAX_HEADS,
    "hidden_size": MAX_WIDTH, "intermediate_size": MAX_WIDTH, "moe_intermediate_size": MAX_WIDTH,
    "head_dim": MAX_WIDTH, "vocab_size": MAX_WIDTH,
}  # fmt: skip
MODEL_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check(name: str, value: int, most: int, hint: str = "") -> None:
    """Raise ConfigError for a number above its limit. `hint` is the advice of the message, such as "say --set
    size=8"."""
    if value > most:
        got = str(value) if value < 10**18 else f"a number of {int(math.log10(value)) + 1} digits"
        raise ConfigError(f"{name} must be at most {most:,}; got {got}{hint and f', {hint}'}")


def check_followed(
    cp_size: int, overlap: bool, most: int = MAX_CP_RANKS, most_overlapped: int = MAX_OVERLAP_RANKS
) -> None:
    """Raise ConfigError for more than `most` CP ranks (size / ulysses), or with overlap more than
    `most_overlapped`."""
    name = "size / ulysses, the ranks that run the schedule,"
    if overlap and most_overlapped < cp_size <= most:
        check(f"{name} with overlap", cp_size, most_overlapped, "leave overlap out or take fewer")
    check(name, cp_size, most, "take a smaller size or a larger ulysses")


def check_model(numbers: Mapping[str, object]) -> None:
    """Raise ConfigError for a model's configuration with a number above its limit, before the model is made. Values
    that are not whole numbers are not checked here."""
    sizes = {name: value for name, value in numbers.items() if isinstance(value, int)}
    for name, most in MODEL.items():
        check(name, sizes.get(name, 0), most)
    experts = max((sizes.get(name, 0) for name in MODEL_EXPERTS), default=0)
    check("experts of all layers together", sizes.get("num_hidden_layers", 1) * experts, MAX_EXPERTS)
