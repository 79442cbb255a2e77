"""The message if no configuration fits: why, and the nearest change with which one does. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..compiler import schedules
from ..compiler.sharding.heads import even_ulysses
from ..compiler.sharding.layout import multiple
from ..config.deepspeed_json import Offload
from . import limits
from .candidates import candidates, ulysses_sizes
from .footprint import rank_bytes
from .request import Request
from .search import Prediction, least_memory, predict


def nothing_fits(request: Request, rejected: Sequence[tuple[str, str]]) -> str:
    """Return the message for a request that nothing fits, with what would fit. `rejected` is that of PlanResult."""
    too_large = [f"{configurations}: {why}" for configurations, why in rejected if "GiB" in why]
    reason = too_large[-1] if too_large else ": ".join(rejected[0]) if rejected else "there is no candidate"
    changes = nearest_fits(request)
    advice = f"take {' or '.join(changes)}" if changes else "take a smaller model"
    tokens = f"{request.seq} tokens on {request.world} ranks"
    return f"a configuration must fit the memory and the length; got none for {tokens} ({reason}), {advice}"


def nearest_fits(request: Request) -> list[str]:
    """Return changes with each of which something fits: a length that can be shared; or more ranks, an offloaded
    optimizer, or a shorter sequence."""
    if (length := fitting_length(request)) > request.seq:
        return [f"{length} tokens"]
    changes = []
    for world in (times * request.world for times in (2, 4, 8, 16, 32)):
        if world > limits.MAX_RANKS:
            break
        larger = dataclasses.replace(request, world=world, sizes=(), given={**request.given, "size": "auto"})
        if length := fitting_length(larger):
            changes.append(f"{world} ranks" + f" with {length} tokens" * (length != request.seq))
            break
    if (offloaded := with_optimiser_on_host(request)) is not None and fitting_length(offloaded) == request.seq:
        changes.append("zero_optimization.offload_optimizer with device cpu")
    shorter = 1 if request.documents else request.seq
    while shorter > 1024:
        shorter //= 2
        if 0 < (length := fitting_length(dataclasses.replace(request, seq=shorter))) < request.seq:
            changes.append(f"{length} tokens")
            break
    return changes


def with_optimiser_on_host(request: Request) -> Request | None:
    """Return the request with the optimizer in host memory; None if it cannot be there, or is there already."""
    if request.zero.optimiser_away or not (request.zero.stage and request.machine.apart):
        return None
    zero = dataclasses.replace(request.zero, offload_optimizer=Offload(device="cpu"))
    return dataclasses.replace(request, zero=zero)


def fitting_length(request: Request) -> int:
    """Return the request's length, or the next one that ranks can share, if the given schedule, or a ring, fits on as
    many ranks as can share a sequence; else 0."""
    wanted = {"schedule": schedules.DEFAULT} | {name: value for name, value in request.given.items() if value != "auto"}
    shapes = [
        pair for pair in ulysses_sizes(request.world, request.heads, wanted) if pair[0] in (request.sizes or pair)
    ]
    size = max((size for size, _ in shapes), default=0)
    if not size or rank_bytes(least_memory(request, size), request.budget) > request.limit:
        return 0
    ulysses_choices = [ulysses for shape_size, ulysses in shapes if shape_size == size]
    even_choices = [
        ulysses for ulysses in ulysses_choices if ulysses in even_ulysses(size, *request.heads)
    ] or ulysses_choices
    for ulysses in sorted({min(even_choices), max(even_choices)}):
        candidate = next(candidates(request.world, request.heads, {**wanted, "size": size, "ulysses": ulysses}), None)
        if candidate is None:  # given settings that fit no shape
            continue
        share = 1 if request.documents else multiple(candidate.layout, size, ulysses)
        length = -(-request.seq // share) * share
        if length > limits.MAX_TOKENS:
            continue
        if isinstance(predict(dataclasses.replace(request, seq=length), candidate), Prediction):
            return length
    return 0
