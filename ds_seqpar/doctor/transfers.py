"""Compare what a call of attention brings each rank with the plan, and measure the links that plans use."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..compiler.program import instructions as op
from ..compiler.schedules.plan import received
from ..compiler.sharding.masks import CAUSAL
from ..runtime.comm import Handle, Message
from ..runtime.devices import this_host
from ..runtime.work import takes_common_off
from .findings import Finding, Job
from .ranks import ADVICE, DIRECTIONS, Gathering
from .reference import random

CPU, DEVICE = (2**20, 4e-3), (2**24, 3e-4)  # bytes of a message each way, seconds below which no link is called slow
FIRST = 64  # bytes of the message before it, after which both ranks are there
ROUNDS, MORE = 4, 5  # messages of which the fastest counts; how often they are sent before a link is called slow
SLOW = 3.0  # times the median of the links of its kind
Link = tuple[str, int, int]  # what it is for, the lower rank, the higher one


class _Group(NamedTuple):
    """Ranks that send to one another."""

    name: str
    members: list[int]  # their global ranks
    own: int  # this rank's number among them
    peers: set[int]  # to which its programs send
    start: Callable[[int, Tensor, Tensor], Handle]  # (peer, sent, received)


def check_transfers(job: Job) -> Gathering:
    """Compare what is received with the plan and with what was sent, and links with one another."""
    if job.sp.size == 1:
        return [Finding(check=name, status="not tried", detail="one rank sends nothing") for name in ("bytes", "links")]
    yield None
    counted, planned = _received(job)
    size, floor = CPU if job.sp.device.type == "cpu" else DEVICE
    best, other = dict[Link, float](), ""
    for _ in range(MORE):
        for link, seconds, text in _measured(job, size):
            best[link], other = min(seconds, best.get(link, seconds)), other or text
        links, slow = _slow((yield best, this_host().name), floor)
        if not slow:
            break
    text = "{:,} elements, {:,} bytes".format(*counted)
    wrong = f"{text} received, where the plan has {{:,}} elements, {{:,}} bytes".format(*planned) * (counted != planned)
    rates = [size / seconds / 1e9 for seconds in links.values()]
    figures = f"{len(links)} links of {min(rates):.2g} to {max(rates):.2g} GB/s each way"
    return [
        Finding.of("bytes", wrong, ADVICE, f"{text} received in a call and its backward, as planned"),
        Finding.of("links", other or "; ".join(slow), "look at cable, port, NUMA node and other traffic", figures),
    ]


def _received(job: Job) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (elements, bytes) that arrived in a call and its backward, and those that plans have."""
    sp, runtime, (heads, kv_heads) = job.sp, job.sp.runtime, job.heads
    (q,), (k, v) = (random(job, 0, (4 * sp.multiple // sp.size, n), count) for n, count in ((heads, 1), (kv_heads, 2)))
    before = sp.comm.received.total(), sp.comm.received_bytes
    with torch.enable_grad(), torch.autocast(sp.device.type, enabled=False):
        out: Any = sp.attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        out.sum().backward()
    counted = sp.comm.received.total() - before[0], sp.comm.received_bytes - before[1]
    planned = [0, 0]
    for direction in DIRECTIONS:
        bound = runtime.last_bound[direction][1][0]
        tokens, block_mask = bound.tokens("q", (0,)), runtime.compiler.block_mask(bound.mask, bound.shards)
        for shape in bound.shapes:
            steps = runtime.compiler.recipe.steps(direction, block_mask, shape, runtime.rank)
            units = shape.elements_per_token(direction), shape.bytes_per_token(direction)
            for at, of_kind in enumerate(units):
                planned[at] += int(received(steps, runtime.rank, {kind: tokens * n for kind, n in of_kind.items()}))
        for instruction in bound.program.code:
            if isinstance(instruction, op.ExchangeStart):
                sizes = bound.exchange_sizes(instruction.exchange)
                others = sum(sizes.incoming) - sizes.incoming[runtime.ulysses.rank]
                planned = [planned[0] + others, planned[1] + others * sizes.itemsize]
    if takes_common_off(job.dtype, 0.0, runtime.size, CAUSAL, None):
        planned[1] += (sp.size - 1) * (2 * kv_heads * job.head_dim + 1) * job.dtype.itemsize
    return counted, (planned[0], planned[1])


def _groups(job: Job) -> Iterator[_Group]:
    """Yield the groups in which this rank sends. Call it after a call of attention."""
    comm, groups, runtime = job.sp.comm, job.sp.groups, job.sp.runtime
    codes = [runtime.last_bound[direction][1][0].program.code for direction in DIRECTIONS]
    if groups.inner is not None:
        members = dist.get_process_group_ranks(groups.inner)
        posts = [instruction for code in codes for instruction in code if isinstance(instruction, op.Post)]
        peers = {transfer.peer for post in posts for transfer in (*post.sends, *post.receives)}

        def post(peer: int, sent: Tensor, arrived: Tensor) -> Handle:
            messages = ([Message(peer, "doctor", 0, x, 0)] if len(x) else [] for x in (sent, arrived))
            return comm.post(*messages)

        yield _Group("transfers", [members[index] for index in groups.cp_order], runtime.rank, peers, post)

    def collective(name: str, group: dist.ProcessGroup, start: Callable[..., Handle]) -> _Group:
        members, own = dist.get_process_group_ranks(group), dist.get_rank(group)

        def begin(peer: int, sent: Tensor, arrived: Tensor) -> Handle:
            sizes = [len(sent) if rank == peer else 0 for rank in range(len(members))]
            return start(sent=sent, received=arrived, sizes=(sizes, sizes))

        return _Group(name, members, own, {*range(len(members))} - {own}, begin)

    if groups.ulysses is not None:
        yield collective("exchanges of heads", groups.ulysses, functools.partial(comm.exchange, "doctor"))
    for ranks, of in groups.collectives.items():
        yield collective("collectives", of.group, functools.partial(comm.all_to_all, ranks, "doctor", 0))


def _measured(job: Job, size: int) -> Iterator[tuple[Link, float, str]]:
    """Yield for each message between this rank and another its link, its seconds and what is wrong with its bytes."""
    rank, device = dist.get_rank(), job.sp.device
    sent = torch.full((size,), rank % 256, dtype=torch.uint8, device=device)
    arrived = torch.empty_like(sent)
    for _, group in itertools.product(range(ROUNDS), list(_groups(job))):
        count = len(group.members)
        for turn in range(count):  # in which each rank has another peer; it may also be itself, or not in the plan
            peer = (turn - group.own) % count
            used, seconds = peer in group.peers, 0.0
            for length in (FIRST, size):
                began = time.perf_counter()
                group.start(peer, *(x[: length * used] for x in (sent, arrived))).wait()
                if device.type != "cpu":
                    torch.accelerator.synchronize()
                seconds = time.perf_counter() - began
            if used:
                other = group.members[peer]
                right = bool((arrived == other % 256).all())
                text = "" if right else f"what rank {rank} got in {group.name} is not what rank {other} sent"
                yield (group.name, min(rank, other), max(rank, other)), seconds, text
                arrived.fill_(rank % 256)


def _slow(by_rank: list, floor: float) -> tuple[dict[Link, float], list[str]]:
    """Return the seconds of all links, and which are slow among those inside hosts, or among those between hosts."""
    links: dict[Link, float] = {}
    for best, _ in by_rank:
        for link, seconds in best.items():
            links[link] = max(seconds, links.get(link, 0.0))
    slow = []
    for inside in (True, False):
        alike = {link: x for link, x in links.items() if (by_rank[link[1]][1] == by_rank[link[2]][1]) == inside}
        # where bridges join devices in pairs, half of the links are faster
        median = statistics.median_high if len(alike) > 2 else statistics.median_low
        usual = median(alike.values()) if alike else 0.0
        slow += [
            f"the link of ranks {a} and {b} takes {x * 1e3:.1f} ms in {name}, where {usual * 1e3:.1f} ms are usual"
            for (name, a, b), x in alike.items()
            if x > SLOW * usual and x > usual + floor
        ]
    return links, slow
