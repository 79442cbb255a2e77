"""Implementation of `deepspeed --module ds_seqpar tune`, which measures a training step of the best plans.

The measurement runs the real engine and a randomly initialized model on the available ranks. Finally, the fastest plan
is measured with all other attention kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import logging
import sys
import time
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..base.errors import CommunicationError, SeqParError
from ..base.hosts import ranks_per_host, this_device
from ..core.compiler.schedules.plan import columns
from ..core.compiler.sharding.heads import largest_share
from ..core.runtime import groups
from ..core.runtime.kernels import KERNELS, BlockSpec, candidates, select
from ..deepspeed.config import SECTION, without_auto
from ..engine import initialize
from ..guards.agreement import all_gather_objects, together
from ..guards.interfaces import gloo_meets_hosts
from ..models import random_model
from ..planner.plan import Planned, name_of, plan
from ..planner.request import Request
from ..planning import detected_machine, hosts_of_all
from .assumed import Answer
from .launched import launched
from .options import DEFAULTS, GIB, Inputs, count
from .plan import in_words, numbers_of, request_of, title, traffic

HEAD = ["s a step", "s a sequence", "estimated", "GiB a rank", "predicted", "MiB in node", "MiB between", "messages",
        "kernel", "configuration"]  # fmt: skip
SLOW = ("reference", "chunked")  # kernels to skip


class Measured(NamedTuple):
    """A plan and the time per step that was measured on the slowest rank."""

    planned: Planned
    seconds: float  # per step with one micro-batch
    memory: int | None  # peak tensor memory on a GPU in bytes; None on CPUs


def run(args: argparse.Namespace) -> None:
    """Run the command. The call is collective across the launched ranks.

    Raises:
        Told: A rank cannot read the options, or no configuration fits or runs. Raised on all ranks.
    """
    quiet = warnings.catch_warnings(action="ignore")  # torch warns about functions that DeepSpeed calls
    with quiet, contextlib.redirect_stdout(sys.stderr), launched("tune", alone=True) as is_first:
        inputs, request, rows = _measured_rows(args, is_first)
    if not is_first:
        return
    rows.sort(key=lambda row: request.seconds_a_sequence(row.seconds, row.planned.config))
    answer = Answer(inputs, rows[0].planned.config, None if args.sequences is None else request.job.sequences)
    if args.json:
        ranked = [
            {**numbers_of(request, row.planned), "measured": {"seconds_a_step": row.seconds, "memory": row.memory}}
            for row in rows
        ]
        print(json.dumps({"section": rows[0].planned.config.section(), "ranked": ranked, **answer.for_json()}))
    else:
        table = columns([HEAD, *(_cells(request, row) for row in rows)])
        note = "GiB, MiB, messages: of the rank with the most; MiB and messages of attention of a layer, as planned."
        print("\n".join([title(request), *answer.lines(), "", *table, "", note, "", *answer.json_lines()]))


def _measured_rows(args: argparse.Namespace, is_first: bool) -> tuple[Inputs, Request, list[Measured]]:
    world = groups.control_world(gloo_meets_hosts)
    hosts, device = hosts_of_all(world), this_device() or torch.device("cpu")
    with together(world, "reading what tune measures", "plans to measure", call="tune") as agreed:
        top, steps = count("--top", args.top), count("--steps", args.steps)
        args.ranks, args.nodes, args.gpus_per_node = str(len(hosts)), None, str(ranks_per_host(hosts))
        inputs, request = request_of(args, detected_machine(hosts))
        plans = list(plan(request).ranked[:top])
        agreed.value = {"plans": [planned.config.settings() for planned in plans]}
    rows: list[Measured] = []

    def measure(planned: Planned, name: str) -> None:
        try:
            rows.append(_measure(args.model, inputs, request, planned, steps))
            told = f"{rows[-1].seconds:.3g} s a step"
        except CommunicationError:
            raise
        except SeqParError as reason:  # the model or kernel does not support the settings or blocks, on any rank
            told = f"cannot run: {reason}"
        if is_first:
            print(f"tune: {name}: {told}", flush=True)

    for number, planned in enumerate(plans, 1):
        measure(planned, f"{number} of {len(plans)}, {in_words(planned)}")
    if not rows:
        raise SeqParError("tune needs a plan that runs; got none, see the reasons above")
    best = min(rows, key=lambda row: request.seconds_a_sequence(row.seconds, row.planned.config)).planned
    for kernel in _other_kernels(request, best, device) if best.config.kernel == "auto" else ():
        config = dataclasses.replace(best.config, kernel=kernel)
        measure(dataclasses.replace(best, config=config), f"{name_of(best.config)}, kernel {kernel}")
    return inputs, request, rows


def _other_kernels(request: Request, planned: Planned, device: torch.device) -> list[str]:
    """Return the kernels that support the model's blocks, excluding the kernel that "auto" selects."""
    heads, dtype = largest_share(*request.heads, planned.config.ulysses), getattr(torch, request.job.dtype)
    spec = BlockSpec(device.type, dtype, *heads, request.model.head_dim)
    others = {*SLOW, select("auto", spec).name}
    return [name for name in candidates(spec) if name not in others and not KERNELS[name].reasons(spec)]


def _measure(place: str, inputs: Inputs, request: Request, planned: Planned, steps: int) -> Measured:
    """Train for one warm-up step and several measured steps. The call is collective."""
    import deepspeed  # imported here, since DeepSpeed takes seconds to import

    job, world = request.job, groups.control_world(gloo_meets_hosts)
    section = {**planned.config.section(), "prove": "never"}
    content = {"optimizer": DEFAULTS["optimizer"], **without_auto(inputs.counted), SECTION: section}
    content |= {"train_micro_batch_size_per_gpu": job.batch or 1, "gradient_accumulation_steps": 1}
    content |= {"steps_per_print": 10**9}
    content.pop("train_batch_size", None)
    level = logging.root.manager.disable
    logging.disable(logging.INFO)  # hides DeepSpeed's messages about each engine
    try:
        torch.manual_seed(0)
        sharded = {name: value for name, value in content.items() if name != SECTION}
        with deepspeed.zero.Init(config_dict_or_path=sharded, enabled=job.zero.stage == 3):
            model = random_model(place)
        if job.checkpointing:
            model.gradient_checkpointing_enable()
        engine = initialize(model=model.train(), config=content, check_loss=False, doctor=False)[0]
        sp, seconds, peak = engine.sequence_parallel, [], None
        ids = torch.randint(request.model.vocab, (job.objective.batch(job.batch or 1), request.seq))
        batch = {"input_ids": ids, "labels": ids}
        if job.documents:
            batch["position_ids"] = torch.cat([torch.arange(length) for length in job.documents]).expand_as(ids)
        for _ in range(1 + steps):
            (local,) = sp.shard_batches([batch], training=False, device=engine.device)
            if on_gpu := engine.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            dist.barrier(world)
            began = time.perf_counter()
            engine.backward(engine(**local).loss)
            engine.step()
            if on_gpu:
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated()
            seconds.append(time.perf_counter() - began)
        mean = sum(seconds[1:]) / steps
        found = all_gather_objects(world, ("tune", mean, peak))
        engine.destroy()
        sp.close()
    finally:
        logging.disable(level)
        engine = model = None
        gc.collect()  # engines are part of reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return Measured(planned, max(one[1] for one in found), peak and max(one[2] for one in found))


def _cells(request: Request, row: Measured) -> list[str]:
    planned, config = row.planned, row.planned.config
    return [
        f"{row.seconds:.3g}", f"{request.seconds_a_sequence(row.seconds, config):.3g}", f"{planned.seconds:.3g}",
        "-" if row.memory is None else f"{row.memory / GIB:.1f}", f"{planned.memory.peak.total / GIB:.1f}",
        *traffic(planned), config.kernel, in_words(planned),
    ]  # fmt: skip
