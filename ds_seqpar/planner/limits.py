"""Limits on input sizes. If a limit is exceeded, a command or a plan raises an error before doing any work.

Within the limits, each command needs less than 2 GiB of memory and about ten seconds on one core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..base.errors import ConfigError

MAX_RANKS = 2**20  # ranks in a job; a plan tries all divisors of this number
MAX_SHARING_RANKS = 2**16  # ranks that share a sequence; the shape of a schedule may depend on all ranks
# ranks that share a sequence in `plan`, which visits all ranks for about a hundred candidates
MAX_PLANNED_RANKS = 2**12
# CP ranks (size / ulysses) in `memory` and `plan`, since a rank's program has one step for each other CP rank. For a
# longer ring, `memory` evaluates a shorter ring with the same memory
MAX_CP_RANKS = 1024
# CP ranks for which `plan` compares schedules; for more ranks, `plan` uses the default schedule
MAX_COMPARED_RANKS = 128
# CP ranks with overlap; the time needed to order products grows with the cube of the number of ranks
MAX_OVERLAP_RANKS = 64
MAX_SHOWN_RANKS = 128  # CP ranks in `show`, which prints and simulates all ranks in all steps
MAX_SHOWN_OVERLAP_RANKS = 64  # CP ranks in `show` with overlap
MAX_DRAWN_RANKS = 64  # CP ranks in a diagram; more ranks could not be told apart
MAX_DOCUMENTS = 2**12  # documents in a sequence; distributing documents across ranks takes milliseconds per document
MAX_PACKED_TOKENS = 2**26  # tokens in packed documents; each token is checked for coverage by ranks
MAX_TOKENS = 2**40  # tokens in a sequence; the search for the longest sequence ends at this length
MAX_HEADS = 2**12
# model sizes; transformers builds a model without allocating memory, which takes milliseconds per layer or expert
MODEL = {"num_hidden_layers": 1000, "num_attention_heads": MAX_HEADS}
MAX_EXPERTS = 30_000  # experts in all layers together; Qwen3-Next has 24,576
MODEL_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check(name: str, value: int, most: int, hint: str = "") -> None:
    """Raise ConfigError if a number exceeds its limit.

    `hint` is advice for the message, such as "say --set size=8".
    """
    if value > most:
        got = str(value) if value < 10**18 else f"a number of {int(math.log10(value)) + 1} digits"
        raise ConfigError(f"{name} must be at most {most:,}; got {got}{hint and f', {hint}'}")


def check_followed(
    cp_size: int, overlap: bool, most: int = MAX_CP_RANKS, most_overlapped: int = MAX_OVERLAP_RANKS
) -> None:
    """Raise ConfigError if there are too many CP ranks (size / ulysses).

    Args:
        cp_size: Number of CP ranks.
        overlap: Whether the schedule overlaps products with messages.
        most: Maximum number of CP ranks.
        most_overlapped: Maximum number of CP ranks with overlap.
    """
    name = "size / ulysses, the ranks that run the schedule,"
    if overlap and most_overlapped < cp_size <= most:
        check(f"{name} with overlap", cp_size, most_overlapped, "leave overlap out or take fewer")
    check(name, cp_size, most, "take a smaller size or a larger ulysses")


def check_model(numbers: Mapping[str, object]) -> None:
    """Raise ConfigError if a model would take too long to build from its configuration.

    Only integers are checked.
    """
    sizes = {name: value for name, value in numbers.items() if isinstance(value, int)}
    for name, most in MODEL.items():
        check(name, sizes.get(name, 0), most)
    experts = max((sizes.get(name, 0) for name in MODEL_EXPERTS), default=0)
    check("experts of all layers together", sizes.get("num_hidden_layers", 1) * experts, MAX_EXPERTS)
