"""Print tables of the bytes that ranks receive with each schedule, computed from plans (docs/benchmarks.md).

    python -m benchmarks.attention.schedules                    # 16 and 64 ranks
    python -m benchmarks.attention.schedules --causal 6 28 120  # the triangle, the best mesh, a ring, the floor

Bytes are those received by the busiest rank in one layer, as multiples of the bf16 q of its own tokens. Partial results
and gradients are sent in the named dtype. Without --causal, attention is full, except for schedules that support only
causal attention. If ranks differ, the mean over ranks is given in parentheses. Schedules that do not support the number
of ranks are omitted.

With --causal, each schedule uses the shape and the moving side with the fewest received bytes. The number of the
triangle's strips is given in parentheses if greater than one. The floor is derived as follows. Suppose that a rank
processes x query rows and y k/v rows, in units of its own n tokens. The rank computes at most x y n^2 pairs, minus the
half of its own n^2 pairs that the mask hides. With A ranks, the rank's share of all pairs is A n^2 / 2. A rank's share
is therefore only possible with x y >= (A + 1) / 2. Each remote query row must be received, and so must its partial
result; k/v rows must be received too and, in backward, their gradients. No schedule with equal shares of work receives
less on average.
"""

from __future__ import annotations

import contextlib
import math

from benchmarks import tables
from benchmarks.contenders import parse
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler.compile import block_mask_of, side_of
from ds_seqpar.core.compiler.program.shape import Shape, shape_of
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.schedules.actions import ACCUMULATORS
from ds_seqpar.core.compiler.schedules.base import ScheduleOptions
from ds_seqpar.core.compiler.sharding.layout import multiple
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL
from ds_seqpar.core.compiler.sharding.shards import EvenShards, Shards, tokens_of
from ds_seqpar.core.settings import SequenceParallelConfig

HEADS = {"MHA": (32, 32), "GQA 4:1": (32, 8), "GQA 8:1": (64, 8)}
WAYS = [(way, travel) for way in ("forward", "backward") for travel in ("fp32", "bf16")]
SHOWN = ("triangle", "mesh", "ring")


def shape_for(heads: tuple[int, int], travel: str) -> Shape:
    return shape_of(travel, "bfloat16", 1, (*heads, 128))


def block_bytes(shape: Shape, direction: str, shards: Shards) -> dict[str, int]:
    """Return the bytes of one block of each kind, for even shards.

    `Plan.received` and `Costs` accept the returned sizes. A rank may have several blocks, which are sent separately.
    """
    sizes = shape.bytes_per_token(direction)
    return {kind: size * shards.tokens(side_of(kind), (0,)) for kind, size in sizes.items()}


def unit(shape: Shape, shards: Shards) -> int:
    """Return the bytes of q for one CP rank's tokens."""
    return shape.bytes_per_token("forward")["q"] * tokens_of(shards, "q", 0)


def names(ranks: int) -> list[str]:
    """Return the contenders that support this number of ranks."""
    side, others = int(ranks**0.5), 2 * ranks // int(ranks**0.5)
    mesh = f"mesh={side // 2},1,{others}"
    teams = [f"wallfacer={team}" for team in sorted({2, side // 2})]
    shapes = [f"attention2d={rows}" for rows in (side, side * 2, side // 2)]
    both = ["ring", "ring+rotate_backward=q", f"double_ring={side}", "distflash"]
    found = [*both, *shapes, *teams, mesh, f"{mesh}+rotate_backward=q", "triangle"]
    fitting = []
    for name in found:
        with contextlib.suppress(ConfigError):
            config_of(ranks, name)
            fitting.append(name)
    return fitting


def config_of(ranks: int, name: str) -> SequenceParallelConfig:
    both = {f"rotate_{way}": "kv" for way in ("forward", "backward") if not causal(name)}
    return SequenceParallelConfig(**{"size": ranks, **both, **parse(name).section}).resolve(ranks)


def causal(name: str) -> bool:
    """Return whether the schedule supports only causal attention, i.e. no product of the first block with a later
    block.
    """
    return not SCHEDULES[parse(name).section["schedule"]].can_compute(0, 1)


def received(ranks: int, name: str, direction: str, shape: Shape) -> str:
    config = config_of(ranks, name)
    shards = EvenShards(config.layout, multiple(config.layout, ranks, 1), ranks)
    block_mask = block_mask_of(CAUSAL if causal(name) else FULL, shards)
    plan = config.recipe(config.topology(ranks)).plan(direction, block_mask, shape)
    found = [value / unit(shape, shards) for value in plan.received(block_bytes(shape, direction, shards))]
    mean = sum(found) / len(found)
    return f"{max(found):.2f}" + (f" ({mean:.2f})" if max(found) > 1.001 * mean else "")


def least(name: str, ranks: int, direction: str, shape: Shape) -> tuple[float, ScheduleOptions]:
    """Return (units that the busiest rank receives with the best shape, the shape); infinity if no shape exists."""
    schedule = SCHEDULES[name]
    found: tuple[float, ScheduleOptions] = math.inf, {}
    heads = shape.q_heads, shape.kv_heads
    for options in schedule.shapes(ranks):
        config = SequenceParallelConfig(size=ranks, ulysses=1, schedule=name, **options).resolve(ranks, heads)
        recipe = config.recipe(config.topology(ranks))
        shards = EvenShards(config.layout, multiple(config.layout, ranks, 1), ranks)
        sizes = block_bytes(shape, direction, shards)
        for side in schedule.moving_sides:
            units = max(recipe.bytes_received(direction, side, sizes)) / unit(shape, shards)
            found = min(found, (units, options), key=lambda one: one[0])
    return found


def floor(ranks: int, direction: str, shape: Shape) -> float:
    """Return the lower bound on the units that ranks receive on average."""
    costs, sizes = {"q": 0.0, "kv": 0.0}, shape.bytes_per_token(direction)
    for kind in ("q", "kv", *ACCUMULATORS[direction]):
        costs[side_of(kind)] += sizes[kind] / shape.bytes_per_token("forward")["q"]
    area = max(1.0, (ranks + 1) / 2)
    x = min(area, max(1.0, math.sqrt(area * costs["kv"] / costs["q"])))
    return costs["q"] * (x - 1) + costs["kv"] * (area / x - 1)


def beside(ranks: int, direction: str, shape: Shape) -> str:
    (ours, options), *others = (least(name, ranks, direction, shape) for name in SHOWN)
    units = [ours, *(found for found, _ in others), floor(ranks, direction, shape)]
    strips = f" ({options['strips']})" if options.get("strips", 1) > 1 else ""
    return f"{ours:.2f}{strips} / {' / '.join(f'{x:.2f}' for x in units[1:])}: {units[0] / units[1]:.2f}"


def main() -> None:
    parser = tables.parser(__doc__, causal=False)
    parser.add_argument("ranks", nargs="*", type=int, metavar="RANKS", default=[])
    args = parser.parse_args()
    columns = [f"{way}, {travel}" for way, travel in WAYS]
    for words, heads in HEADS.items():
        shapes = [(way, shape_for(heads, travel)) for way, travel in WAYS]
        title = f"{words} ({heads[0]}/{heads[1]} heads of 128)"
        if args.causal:
            print(f"\n{title}: triangle / best mesh / ring / floor: triangle over mesh\n")
            counts = args.ranks or (6, 12, 28, 120)
            tables.stream(["ranks", *columns], ([n, *(beside(n, *one) for one in shapes)] for n in counts))
        else:
            for ranks in args.ranks or (16, 64):
                print(f"\n{ranks} ranks, {title}\n")
                rows = ([name, *(received(ranks, name, *one) for one in shapes)] for name in names(ranks))
                tables.stream(["contender", *columns], rows)


if __name__ == "__main__":
    main()
