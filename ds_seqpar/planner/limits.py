"""Limits on what an answer may cost: a command, or the plan of a training run, refuses a larger number before any work.

Within these limits each command needs less than 2 GiB and some ten seconds of one core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..base.errors import ConfigError

MAX_RANKS = 2**20  # of a job: a plan visits their divisors
MAX_SHARING_RANKS = 2**16  # ranks that share a sequence: a schedule's shape may depend on all of them
MAX_PLANNED_RANKS = 2**12  # the same, in `plan`: it visits them for each of a hundred candidates
# CP ranks (size / ulysses), in `memory` and `plan`: a rank's program has a step for each other CP rank. Of a
# longer ring `memory` computes a short one in its place, which needs as much memory
MAX_CP_RANKS = 1024
MAX_COMPARED_RANKS = 128  # CP ranks for which `plan` compares schedules; of more it takes the default
MAX_OVERLAP_RANKS = 64  # CP ranks with overlap: ordering their products takes time that grows with their cube
MAX_SHOWN_RANKS = 128  # CP ranks, in `show`: it prints and simulates all ranks in all steps
MAX_SHOWN_OVERLAP_RANKS = 64  # the same, with overlap
MAX_DRAWN_RANKS = 64  # CP ranks in a picture: more could not be told apart
MAX_DOCUMENTS = 2**12  # of a sequence: a plan distributes them over ranks, which takes milliseconds a document
MAX_PACKED_TOKENS = 2**26  # of a sequence of documents: whether ranks hold all of them is checked one by one
MAX_TOKENS = 2**40  # of a sequence: the search for the longest one ends here
MAX_HEADS = 2**12
# sizes of a model's configuration, which transformers makes without memory, in milliseconds a layer or expert
MODEL = {"num_hidden_layers": 1000, "num_attention_heads": MAX_HEADS}
MAX_EXPERTS = 30_000  # of all layers together: Qwen3-Next has 24,576
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
    """Raise ConfigError for a model's configuration that would take too long to build. Values that are not whole
    numbers are not checked here.
    """
    sizes = {name: value for name, value in numbers.items() if isinstance(value, int)}
    for name, most in MODEL.items():
        check(name, sizes.get(name, 0), most)
    experts = max((sizes.get(name, 0) for name in MODEL_EXPERTS), default=0)
    check("experts of all layers together", sizes.get("num_hidden_layers", 1) * experts, MAX_EXPERTS)
