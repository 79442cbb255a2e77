"""Implementation of `ds-seqpar show`, which shows a schedule's steps as a table, an image or a timeline."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from ..analysis import nccl
from ..analysis.draw import draw
from ..analysis.listing import listing
from ..base.errors import ConfigError
from ..core.compiler.compile import Compiler, block_mask_of
from ..core.compiler.program.instructions import HeadExchange
from ..core.compiler.program.shape import Shape, shape_of, token_bytes
from ..core.compiler.program.ulysses import Heads, SavedForBackward, UlyssesGroup
from ..core.compiler.schedules import SCHEDULES, settings
from ..core.compiler.sharding.heads import busiest_ulysses_rank, largest_share
from ..core.compiler.sharding.layout import LAYOUTS, multiple
from ..core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ..core.compiler.sharding.shards import EvenShards, Shards
from ..core.compiler.tiles.launches import PLAIN_KERNEL
from ..core.compiler.tiles.tiles import tiles
from ..core.settings import COMM_DTYPES, RANK_ORDERS, ROTATES, SequenceParallelConfig, check_length, setting_names
from ..planner import limits
from ..planner.machine import DEFAULT
from ..schedules.simulate import Costs, HeadSplit, communication, computation, programs_of, simulate
from ..schedules.validate import validate
from . import packs

HEAD_DIM = 128

LEGEND = """(q(1)*kv(0) is a product of blocks of queries and keys; kv(0)>2 goes to rank 2, kv(3)<0 comes from rank 0)
"""


GROUPS = """(each rank above stands for {0} of the {1} that share a sequence: rank r of it is number r // {0} here)
"""


def add_parser(commands: Any) -> None:
    """Add the parser of `show`."""
    show = commands.add_parser(
        "show",
        help="print a plan as a table of ranks and steps; nothing is run",
        epilog="\n".join(
            ["schedules:", *(f"  {name:14}{schedule.summary}" for name, schedule in sorted(SCHEDULES.items()))]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("--size", type=int, default=4, help="ranks that share a sequence")
    for name, option in _settings_options().items():
        show.add_argument(_flag(name), **option)
    show.add_argument(
        "--heads", type=int, nargs=2, default=(8, 8), metavar=("HQ", "HKV"), help="for bytes; default: 8 8"
    )
    show.add_argument("--full", action="store_true", help="without a causal mask")
    show.add_argument("--plan", action="store_true", help='print the plan alone, for "schedule": "file:PATH"')
    show.add_argument("--program", type=int, metavar="RANK", help="also print what one CP rank executes")
    show.add_argument(
        "--seq", type=int, help="tokens of the sequence, for bytes and the critical path; default: a short one"
    )
    show.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    show.add_argument("--png", metavar="FILE", help="also draw the time line of the (first) direction, or the packs")
    show.add_argument(
        "--lengths", metavar="FILE", help="of an optimizer step's samples: show instead its packs on ranks"
    )
    show.add_argument("--model", metavar="PLACE", help="for --lengths: folder of a model, or its config.json")
    show.add_argument(
        "--tokens-per-rank", type=int, metavar="N", help="for --lengths: most that a rank holds of a pack"
    )
    show.add_argument("--ranks", type=int, metavar="P", help="for --lengths: of all groups; default: one group")
    show.add_argument("--machine", metavar="NAME", help=f"for --lengths, as of plan; default: {DEFAULT}")
    show.add_argument("--trace", metavar="FILE", help="also write it for ui.perfetto.dev, where a byte takes a second")


def _settings_options() -> dict[str, dict[str, Any]]:
    """Return the keyword arguments for each setting's option, by setting name."""
    options: dict[str, dict[str, Any]] = {
        "ulysses": {"type": int, "help": "ranks that exchange heads; the schedule runs on the others; default: 1"},
        "head_chunks": {"type": int, "help": "chunks of the heads, attended to one after the other"},
        "schedule": {"help": f"one of {', '.join(sorted(SCHEDULES))}, or file:PATH"},
        "layout": {"help": f"one of {', '.join(LAYOUTS)}"},
        "overlap": {"action": "store_true", "help": "order products as operands arrive"},
        "rank_order": {"nargs": "+", "help": f"one of {', '.join(RANK_ORDERS)}, or axes"},
        "comm_dtype": {"help": f"one of {', '.join(COMM_DTYPES)}"},
    }
    options |= {name: {"help": f"one of {', '.join(ROTATES)}"} for name in ("rotate_forward", "rotate_backward")}
    for name, (setting, schedule) in settings().items():
        options[name] = {"help": f"for schedule {schedule.name}: {setting.help}", **setting.option}
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(args: argparse.Namespace) -> None:
    """Run the command. Raise ConfigError for invalid settings."""
    given = {name: value for name in setting_names() if (value := getattr(args, name, None)) is not None}
    if len(given.get("rank_order", ())) == 1:
        given["rank_order"] = given["rank_order"][0]
    if args.lengths is None:
        given.setdefault("ulysses", 1)
    config = SequenceParallelConfig(**given)
    _check_limits(args)
    if args.lengths is not None:
        packs.show(args, config)
        return
    config = config.resolve(args.size, heads=tuple(args.heads))
    recipe = config.recipe(config.topology(args.size))
    ulysses_size, head_chunks = config.ulysses, config.head_chunks
    first_chunk = Heads.of(args.heads[0], args.heads[1], UlyssesGroup(ulysses_size, 0), head_chunks).head_chunks[0]
    local = shape_of(config.comm_dtype, "bfloat16", 1, (*args.heads, HEAD_DIM))
    heads = *largest_share(*first_chunk.counts, ulysses_size), HEAD_DIM  # for the Ulysses rank with the most work
    shape = shape_of(config.comm_dtype, "bfloat16", 1, heads)
    seq = 4 * multiple(config.layout, config.size, config.ulysses) if args.seq is None else args.seq
    check_length(config, seq)
    shards: Shards = EvenShards(config.layout, seq, recipe.size)
    mask = FULL if args.full else CAUSAL
    saved = config.kept(head_chunks, False, False) if ulysses_size > 1 else SavedForBackward.QKV_AND_OUT
    head_split = HeadSplit(ulysses_size, head_chunks, saved, config.overlap)
    directions = ("forward", "backward") if args.direction == "both" else (args.direction,)
    legend = LEGEND + GROUPS.format(ulysses_size, config.size) * (ulysses_size > 1)
    if args.program is not None and args.program not in range(recipe.size):
        raise ConfigError(f"--program must be one of the {recipe.size} CP ranks from 0 on; got {args.program}")
    for index, direction in enumerate(directions):
        block_mask = block_mask_of(mask, shards)
        plan = recipe.plan(direction, block_mask, shape)
        validate(plan, block_mask.pairs())
        nccl.check([programs_of(plan)])
        costs = Costs(
            transfer=shape.bytes_per_token(direction),
            product=1.0,
            weight=visible_share(mask, shards),
            exchange=functools.partial(exchange_bytes_per_token, shape, ulysses_size),
        )
        if args.plan:
            print(plan.table(), end="\n\n")
            continue
        if communication(plan, costs):
            costs = costs.balanced(plan)
        bound = max(communication(plan, costs), computation(plan, costs))
        print(plan.table())
        timeline = simulate(programs_of(plan, head_split), costs)
        slower = timeline.seconds / (head_chunks * bound)
        print(f"critical path: {slower:.2f} times the products alone, on links that need as much time")
        print(legend if index == 0 else "")
        if args.program is not None:
            ulysses_group = UlyssesGroup(ulysses_size, busiest_ulysses_rank(*first_chunk.counts, ulysses_size))
            compiler = Compiler(recipe, args.program)
            call = compiler.bound_call(direction, mask, shards, local, ulysses_group, PLAIN_KERNEL, head_chunks, saved)
            print(listing(call), end="\n\n")
        if args.png is not None and index == 0:
            draw(plan, timeline, costs, slower, args.png, head_split)
            print(f"wrote {args.png}\n")
        if args.trace is not None and index == 0:
            timeline.save(args.trace, "CP" * (ulysses_size > 1))
            print(f"wrote {args.trace}\n")


def _check_limits(args: argparse.Namespace) -> None:
    """Raise ConfigError for a plan that `show` could not process within about ten seconds."""
    limits.check("--heads", max(args.heads), limits.MAX_HEADS)
    limits.check("--seq", args.seq or 0, limits.MAX_TOKENS)
    limits.check("--size", args.size, limits.MAX_RANKS)
    cp_size = -(-args.size // max(1, args.ulysses or 1))
    limits.check_followed(cp_size, args.overlap, limits.MAX_SHOWN_RANKS, limits.MAX_SHOWN_OVERLAP_RANKS)
    if args.png:
        limits.check("--png takes size / ulysses, which", cp_size, limits.MAX_DRAWN_RANKS, "leave --png out")


def visible_share(mask: Mask, shards: Shards) -> Callable[[int, int], float]:
    """Return a function that maps a q block and a kv block to the visible fraction of their product, from 0 to 1."""

    @functools.cache
    def share(q: int, kv: int) -> float:
        all_pairs = shards.tokens("q", (q,)) * shards.tokens("kv", (kv,))
        visible_pairs = sum(tile.pairs for tile in tiles(shards.runs("q", (q,)), shards.runs("kv", (kv,)), mask))
        return visible_pairs / all_pairs if all_pairs else 0.0

    return share


def exchange_bytes_per_token(shape: Shape, ulysses_size: int, exchange: HeadExchange) -> float:
    """Return the number of bytes per token that a Ulysses rank receives from other ranks in an exchange.

    Tokens are counted per CP rank, and all Ulysses ranks are assumed to have equal shares. `shape` describes the
    Ulysses rank's inner tensors.
    """
    size = token_bytes(shape.field(name) for name in exchange.fields)
    return shape.batch * size * (ulysses_size - 1) / ulysses_size
