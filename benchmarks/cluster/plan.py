"""Compute the bytes that an attention call sends between nodes, from the programs of all ranks. Nothing is run."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence

from benchmarks.contenders import Spec
from ds_seqpar.core.compiler.compile import BoundProgram, Compiler
from ds_seqpar.core.compiler.program.instructions import ExchangeStart, GatherStart, Post, ScatterStart
from ds_seqpar.core.compiler.program.shape import ITEMSIZE, shape_of
from ds_seqpar.core.compiler.program.ulysses import UlyssesGroup
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.compiler.tiles.launches import PLAIN_KERNEL
from ds_seqpar.core.settings import SequenceParallelConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
Place = tuple[int, int]  # Ulysses rank, CP rank


def bytes_between(
    spec: Spec, args: argparse.Namespace, config: SequenceParallelConfig | None = None,
    directions: Sequence[str] = ("forward", "backward"),
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Return the bytes (out of, into) every node in the given directions. Ranks are numbered node by node.

    Args:
        spec: The contender.
        args: Needs seq, heads, kv_heads, head_dim, dtype, causal, world, nodes and ranks_per_node.
        config: The resolved configuration, if already known.
        directions: The directions to include.

    Raises:
        ConfigError: The settings are invalid.
    """
    if config is None and not spec.peer:
        section = {"size": args.world, **spec.section}
        config = SequenceParallelConfig.from_dict(section).resolve(args.world, (args.heads, args.kv_heads))
    messages = _ours(config, args, directions) if config else _deepspeed(args, directions)
    out, into = [0] * args.nodes, [0] * args.nodes
    for source, target, size in messages:
        if (a := source // args.ranks_per_node) != (b := target // args.ranks_per_node):
            out[a] += size
            into[b] += size
    return out, into


def _deepspeed(args: argparse.Namespace, directions: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yield the messages of four all-to-alls in each direction: q, k, v and out, or their gradients."""
    heads = 2 * len(directions) * (args.heads + args.kv_heads) // args.world
    size = args.seq // args.world * args.head_dim * ITEMSIZE[DTYPES[args.dtype]] * heads
    return ((a, b, size) for a, b in itertools.permutations(range(args.world), 2))


def _ours(
    config: SequenceParallelConfig, args: argparse.Namespace, directions: Sequence[str]
) -> Iterator[tuple[int, int, int]]:
    if (head_chunks := config.head_chunks) == "auto":
        raise ValueError('the bytes of head_chunks "auto" are known to the run only; got it, give a number')
    topology, cp_size = config.topology(args.world), args.world // config.ulysses
    shards, mask = EvenShards(config.layout, args.seq, cp_size), CAUSAL if args.causal else FULL
    local = shape_of(config.comm_dtype, DTYPES[args.dtype], 1, (args.heads, args.kv_heads, args.head_dim))
    at = {(topology.index(r, "ulysses"), topology.index(r, *topology.cp_axes)): r for r in range(args.world)}
    recipe, kept = config.recipe(topology), config.kept(head_chunks, False, False)
    for place, rank in at.items():
        compiler, ulysses = Compiler(recipe, place[1]), UlyssesGroup(config.ulysses, place[0])
        for direction in directions:
            bound = compiler.bound_call(direction, mask, shards, local, ulysses, PLAIN_KERNEL, head_chunks, kept)
            for source, size in received(bound, place):
                yield at[source], rank, size


def received(bound: BoundProgram, place: Place) -> Iterator[tuple[Place, int]]:
    """Yield (source, bytes) for all data that a rank's program receives.

    In an exchange of heads, data arrives from every other Ulysses rank.
    """
    ulysses_rank, cp_rank = place
    for one in bound.program.code:
        if isinstance(one, Post):
            yield from (((ulysses_rank, t.peer), bound.unit_bytes(t.slot, *t.unit)) for t in one.receives)
        elif isinstance(one, GatherStart | ScatterStart):
            slot, its = one.sent if isinstance(one, GatherStart) else one.received, one.collective
            size = bound.unit_bytes(slot, its.kind, its.key_of(cp_rank))
            yield from (((ulysses_rank, other), size) for other in one.ranks if other != cp_rank)
        elif isinstance(one, ExchangeStart):
            sizes = bound.exchange_sizes(one.exchange)
            yield from (((m, cp_rank), n * sizes.itemsize) for m, n in enumerate(sizes.incoming) if m != ulysses_rank)
