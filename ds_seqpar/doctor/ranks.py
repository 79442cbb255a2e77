"""Check software and settings on all ranks, the assignment of tokens to ranks, and the speed of links."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import itertools
import os
import platform
import statistics
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..base.fingerprint import Fingerprint, fields_of
from ..base.hosts import device_name, this_host
from ..core.compiler.program import instructions as op
from ..core.compiler.sharding.masks import CAUSAL
from ..core.compiler.sharding.shards import runs_of_sp_rank
from ..core.runtime.call import CallSettings
from ..core.runtime.kernels import Scores
from ..core.runtime.transport import Message
from ..deepspeed.config import DeepSpeedJson
from ..guards.agreement import differences
from .findings import Finding, Job

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "flash-attn", "liger-kernel", "triton")
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "CUBLAS_", "DS_", "CUDA_DEVICE_MAX_CONNECTIONS")
# variables that may differ between hosts or ranks, such as the names of network interfaces
OF_A_HOST = ("IFNAME", "HCA", "GID_INDEX", "PLACES", "NCCL_DEBUG", "_LOGS", "_TRACEBACK")
ADVICE = "see which part of ds_seqpar, or which schedule or layout of your own, is not as it was"
# (bytes sent in each direction, seconds up to which a link never counts as slow)
CPU, DEVICE = (2**20, 4e-3), (2**24, 3e-4)
FIRST = 64  # size in bytes of a preceding message that synchronizes both ranks
ROUNDS, MORE = 4, 5  # the fastest of ROUNDS messages counts, with up to MORE attempts before a link is reported as slow
SLOW = 3.0  # multiple of the median time of links inside or between hosts
Link = tuple[int, int]  # (lower rank, higher rank)
Gathering = Generator[Any, list[Any], list[Finding]]  # see `findings.Check`


def installed() -> dict[str, str]:
    """Return the versions of Python and the relevant packages, by name."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return versions


def set_variables() -> dict[str, str]:
    """Return the environment variables that affect communication or computation, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def environment(job: Job) -> Gathering:
    """Compare the ranks' versions, devices and environment variables that affect communication or computation."""
    # hash the source, since editable installs of the same version may differ between hosts
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    versions = {"ds_seqpar": str(Fingerprint.of_bytes(source)), **installed(), "device": device_name(job.sp.device)}
    variables = {name: x for name, x in set_variables().items() if not name.endswith(OF_A_HOST) and "/" not in x}
    by_rank = zip(*(yield versions, variables), strict=True)
    shown = (", ".join(f"{name} {x}" for name, x in own.items()) or "none set" for own in (versions, variables))
    advice = "install the same on all hosts, and start all ranks in it", "let the launcher set them for all ranks"
    return [*map(alike, ("versions", "variables"), by_rank, advice, shown)]


def alike(check: str, by_rank: Any, advice: str, passed: str) -> Finding:
    """Compare fields between ranks, and report a failure if any field differs."""
    difference = differences({rank: (check, fields) for rank, fields in enumerate(by_rank)})
    return Finding.of(check, difference and f"all ranks need the same {difference}", advice, passed)


def agreement(job: Job) -> Gathering:
    """Compare the ranks' resolved settings, and check that each token is assigned to exactly one rank."""
    sp, runtime, tokens = job.sp, job.sp.runtime, 4 * job.sp.multiple
    config, shards = runtime.config, runtime.shards(tokens // runtime.size)
    held = [runs_of_sp_rank(shards, "q", runtime.ulysses.size, rank) for rank in range(sp.size)]
    positions = sorted(itertools.chain.from_iterable(run.positions for runs in held for run in runs))
    fields = fields_of(config.settings()) | {"topology": str(runtime.topology.axes), "heads": str(job.heads)}
    fields |= fields_of(DeepSpeedJson.read(job.content).resolved) if job.content else {}
    for rank, runs in enumerate(held):
        spans = (f"{run.start}-{run.last}" + f" by {run.step}" * (run.step > 1) for run in runs)
        fields[f"tokens of SP rank {rank}"] = " ".join(spans)
    wrong = ""
    if positions != list(range(tokens)):
        wrong = f"{tokens} tokens must be held once; got {len(positions)}, of which {len({*positions})} are different"
    by_rank, numbers = zip(*(yield fields, (sp.data_rank, sp.rank)), strict=True)
    if len({*numbers}) < len(numbers):
        wrong = f"each rank needs an own (group, SP rank); got {numbers}"
    passed = f'size {config.size}, ulysses {config.ulysses}, schedule "{config.schedule}", layout "{config.layout}"'
    return [
        alike("settings", by_rank, "give all ranks the same configuration", passed),
        Finding.of("shares", wrong, ADVICE, f"each of {tokens} tokens is held once"),
    ]


def links(job: Job) -> Gathering:
    """Compare received data with sent data, and compare the speed of links."""
    if job.sp.size == 1:
        return [Finding(check="links", status="not tried", detail="one rank sends nothing")]
    members, peers = dist.get_process_group_ranks(job.sp.groups.sp), _peers(job)
    comm, rank, best, other = copy.copy(job.sp.comm), dist.get_rank(), dict[Link, float](), ""
    groups: Any = SimpleNamespace(inner=job.sp.groups.sp, cp_order=range(job.sp.size))  # use one group for all links
    comm.groups, (size, floor) = groups, CPU if job.sp.device.type == "cpu" else DEVICE
    sent = torch.full((size,), rank % 256, dtype=torch.uint8, device=job.sp.device)
    yield None
    for _ in range(MORE):
        for _, turn in itertools.product(range(ROUNDS), range(len(members))):
            number = (turn - members.index(rank)) % len(members)  # the peer's index in this turn
            if (peer := members[number]) not in peers:
                continue
            arrived, seconds = sent.clone(), 0.0
            for length in (FIRST, size):
                began = time.perf_counter()
                comm.post(*([Message(number, "doctor", 0, x[:length], 0)] for x in (sent, arrived))).wait()
                if job.sp.device.type != "cpu":
                    torch.accelerator.synchronize()
                seconds = time.perf_counter() - began
            link = min(rank, peer), max(rank, peer)
            best[link] = min(seconds, best.get(link, seconds))
            other = other or f"what rank {rank} got is not what rank {peer} sent" * bool((arrived != peer % 256).any())
        all_of, slow = slow_ones((yield best, this_host().name), floor)
        if not slow:
            break
    rates = [size / seconds / 1e9 for seconds in all_of.values()]
    figures = f"{len(rates)} links of {min(rates):.2g} to {max(rates):.2g} GB/s each way"
    advice = "look at cable, port, NUMA node and other traffic"
    return [Finding.of("links", other or "; ".join(slow), advice, figures)]


def _peers(job: Job) -> set[int]:
    """Return the ranks that exchange messages with this rank."""
    groups, runtime, tokens = job.sp.groups, job.sp.runtime, 4 * job.sp.multiple // job.sp.size
    q = torch.empty(1, tokens, job.heads[0], job.head_dim, dtype=job.dtype, device=job.sp.device)
    keys, peers = (1, tokens, job.heads[1], job.head_dim), set[int]()
    for group in (groups.ulysses, *(of.group for of in groups.collectives.values())):
        peers |= {*dist.get_process_group_ranks(group)} if group is not None else set()
    if groups.inner is not None:
        members = [dist.get_process_group_ranks(groups.inner)[index] for index in groups.cp_order]
        shapes, settings = [q.shape, keys, keys], CallSettings(CAUSAL, None, Scores(1.0))
        bound = [runtime.bound(direction, q, shapes, settings)[0] for direction in ("forward", "backward")]
        posts = [one for program in bound for one in program.program.code if isinstance(one, op.Post)]
        peers |= {members[transfer.peer] for post in posts for transfer in (*post.sends, *post.receives)}
    return peers - {dist.get_rank()}


def slow_ones(by_rank: list[tuple[dict[Link, float], str]], floor: float) -> tuple[dict[Link, float], list[str]]:
    """Return the times of all links in seconds, and a description of each link that is slower than similar links.

    Links inside hosts and links between hosts are compared separately.

    Args:
        by_rank: The time of each rank's links in seconds, and the rank's host.
        floor: The time in seconds up to which a link never counts as slow.
    """
    links, slow = dict[Link, float](), []
    for link, seconds in (item for best, _ in by_rank for item in best.items()):
        links[link] = max(seconds, links.get(link, 0.0))
    for inside in (True, False):
        alike = {link: x for link, x in links.items() if (by_rank[link[0]][1] == by_rank[link[1]][1]) == inside}
        # half of the links are faster if bridges connect pairs of devices
        usual = (statistics.median_high if len(alike) > 2 else statistics.median_low)(alike.values() or [0.0])
        slow += [
            f"the link of ranks {a} and {b} takes {x * 1e3:.1f} ms, where {usual * 1e3:.1f} ms are usual"
            for (a, b), x in alike.items()
            if x > SLOW * usual and x > usual + floor
        ]
    return links, slow
