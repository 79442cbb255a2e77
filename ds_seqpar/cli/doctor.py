"""Implementation of `deepspeed --module ds_seqpar doctor`, which examines a job before training.

The doctor checks ranks, links, kernels, attention and a small copy of a model, on launched ranks or in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import Any

import torch

from ..base.errors import SECTION, as_seqpar_error
from ..core.compiler import schedules
from ..core.runtime.groups import all_ranks
from ..core.settings import SequenceParallelConfig
from ..deepspeed.config import DeepSpeedJson, without_auto
from ..doctor import Job, examined, table
from ..models import doctor_of_models, required_patcher
from ..parallel import SequenceParallel
from ..planning import job_of
from . import options
from .launched import launched

OF_SEVERAL_RANKS = ("size", "ulysses", "rank_order", *schedules.settings())  # settings that require several processes


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code, which is 1 if a check failed and 0 otherwise.

    The call is collective across ranks. The command also runs without a launcher.

    Raises:
        Told: A rank cannot read the configuration or the model. Raised on all ranks.
    """
    # also hides DeepSpeed's lines
    with contextlib.redirect_stdout(sys.stderr), launched("doctor", alone=True) as is_first:
        config, job, planned, error = None, dict[str, Any](), None, None
        try:
            content = options.content_of(args)
            section, read = content.get(SECTION, {}), DeepSpeedJson.read(without_auto(content))
            ranks = all_ranks().size()
            if ranks == 1:
                section = {name: x for name, x in section.items() if name not in OF_SEVERAL_RANKS}
            models = doctor_of_models()
            model = models.model_of(args.model, ranks)
            job = {"model": model, "dtype": getattr(torch, read.known.dtype), "content": content}
            job |= models.shape_of(model)
            config = SequenceParallelConfig.from_dict(section)
            planned = required_patcher(model).job_of(model, job_of(read)) if config.asks_for_plan else None
        except Exception as reason:
            error = as_seqpar_error("reading what the doctor examines failed", reason)
        with SequenceParallel(config, heads=job.get("heads"), job=planned, error=error) as sp:
            progress = (lambda name: print(f"doctor: {name}", flush=True)) if is_first else lambda _: None
            findings = examined(Job(sp=sp, quick=args.quick, **job), progress)
    if is_first:
        shown = json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1)
        print(shown if args.json else table(findings))
    return int(any(finding.status == "fail" for finding in findings))
