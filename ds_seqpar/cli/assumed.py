"""What an answer of `memory` or `plan` holds for, and how to train so: a DeepSpeed JSON and what goes with it."""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

from ..config.deepspeed_json import SECTION
from ..config.settings import SequenceParallelConfig
from ..files import shown
from .options import GIB, Told

OPTIMIZER = "AdamW"  # whose states and time are counted
# dtype -> the Trainer's flag
HALVES = {"bfloat16": "--bf16", "float16": "--fp16"}


class Answer(NamedTuple):
    """What a command found, for who wants to train so. config: resolved. sequences: of an optimiser step; None: as many
    as the JSON says."""

    told: Told
    config: SequenceParallelConfig
    sequences: int | None = None

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch on all ranks."""
        return self.told.world // self.config.size * (self.told.job.batch or 1)

    @property
    def steps(self) -> int:
        """Micro-batches of an optimiser step."""
        if self.sequences is not None:
            return -(-self.sequences // self.micro_batch)
        return self.told.job.steps or max(1, (self.told.job.sequences or 0) // self.micro_batch)

    def assumed(self) -> dict[str, Any]:
        """For --json."""
        job, machine = self.told.job, self.told.machine
        sequences = self.steps * self.micro_batch
        return {
            "dtype": job.dtype,
            "zero_stage": job.zero.stage,
            "offload_optimizer": job.zero.offload_optimizer.device,
            "offload_param": job.zero.offload_param.device,
            "gradient_checkpointing": job.checkpointing,
            "optimizer": OPTIMIZER,
            "micro_batch": job.batch or 1,
            "sequences_a_step": sequences,
            "tokens_a_step": sequences * self.told.seq,
            "ranks": self.told.world,
            "machine": machine and {"name": machine.name, "ranks_a_node": machine.per_node, "memory": machine.memory},
        }

    def lines(self) -> list[str]:
        """What was assumed, for the user."""
        found, machine = self.assumed(), self.told.machine
        away = [f"{name} on {device}" for name in ("offload_optimizer", "offload_param")
                if (device := found[name]) != "none"]  # fmt: skip
        told = self.told.content.get("optimizer")
        kind = told.get("type") if isinstance(told, dict) else None
        other = f" (not the JSON's {kind})" if isinstance(kind, str) and "adam" not in kind.lower() else ""
        words = [
            found["dtype"],
            f"ZeRO-{found['zero_stage']}",
            *away,
            f"gradient checkpointing {'on' if found['gradient_checkpointing'] else 'off'}",
            f"{OPTIMIZER}{other}",
            f"micro-batch {found['micro_batch']}",
            f"{found['sequences_a_step']} sequence{'s' * (found['sequences_a_step'] > 1)} "
            f"({found['tokens_a_step']:,} tokens) a step",
        ]
        if machine:
            limit = machine.usable if self.told.memory is None else self.told.memory
            words += [
                f"{limit / GIB:.1f} of {machine.memory / GIB:.1f} GiB for tensors",
                f"nodes of {machine.per_node}",
            ]
        return [f"assumed: {'; '.join(words)}"]

    def deepspeed_json(self) -> dict[str, Any]:
        """The whole JSON, with the section of the configuration. An "auto" stays the Trainer's to fill in."""
        content = copy.deepcopy(self.told.content)
        if self.sequences is not None:
            content["gradient_accumulation_steps"] = self.steps
            if "train_batch_size" in content:
                content["train_batch_size"] = self.steps * self.micro_batch
        return {**content, SECTION: self.config.section()}

    def flags(self) -> list[str]:
        """What a Trainer must be told beside the JSON, which has to say the same."""
        job, content = self.told.job, self.deepspeed_json()
        given = content.get("optimizer")
        rate = given.get("params", {}).get("lr") if isinstance(given, dict) else None
        flags = {
            "--gradient_checkpointing": job.checkpointing,
            HALVES.get(job.dtype, ""): job.dtype in HALVES,
            "--per_device_train_batch_size": job.batch or 1,
            "--gradient_accumulation_steps": self.steps,
            "--learning_rate": rate if isinstance(rate, float) else False,
            "--max_grad_norm": clip if isinstance(clip := content.get("gradient_clipping"), int | float) else False,
        }
        return [f"{name} {value}" for name, value in flags.items() if value is not False]

    def json_lines(self) -> list[str]:
        """The JSON for the user, a line for each key, and what goes with it."""
        items = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in self.deepspeed_json().items()]
        calls = "call model.gradient_checkpointing_enable(), " * self.told.job.checkpointing
        return [
            "ds_config.json:", "", "{", *",\n".join(items).split("\n"), "}", "",
            f"with it a Trainer takes {' '.join(self.flags())}",
            f"a loop of your own: {calls}give {self.told.seq:,} tokens a sequence, on {self.told.world} ranks",
            *self.auto_lines(),
        ]  # fmt: skip

    def auto_lines(self) -> list[str]:
        """The value that each "auto" counts as."""
        values = ", ".join(f"{key} {shown(value)}" for key, value in self.told.filled.items())
        return ["", f'what the configuration leaves "auto" counts as {values}'] if values else []

    def for_json(self) -> dict[str, Any]:
        """The keys that --json has of it."""
        return {"auto": self.told.filled, "assumed": self.assumed(), "deepspeed_json": self.deepspeed_json(),
                "trainer_flags": self.flags()}  # fmt: skip
