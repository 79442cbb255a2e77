"""Assumptions behind the answers of `memory`, `plan` and `tune`, and a matching DeepSpeed JSON and Trainer flags."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any, NamedTuple

from ..base.files import shown
from ..core.settings import SequenceParallelConfig
from ..deepspeed.config import OPTIMIZER_STATES, SECTION
from ..planner.estimate import estimate, tower_seconds
from .options import GIB, Inputs

OPTIMIZER = "AdamW"  # assumed if the states of the optimizer in the JSON are unknown
# the Trainer's flag by dtype
HALVES = {"bfloat16": "--bf16", "float16": "--fp16"}


class Answer(NamedTuple):
    """The result of a command, together with the settings for training."""

    inputs: Inputs
    config: SequenceParallelConfig  # resolved
    sequences: int | None = None  # per optimizer step; None to use the number in the JSON

    @property
    def micro_batch(self) -> int:
        """The number of sequences per micro-batch across all ranks."""
        return self.inputs.world // self.config.size * (self.inputs.job.batch or 1)

    @property
    def steps(self) -> int:
        """The number of micro-batches per optimizer step."""
        if self.sequences is not None:
            return -(-self.sequences // self.micro_batch)
        return self.inputs.job.steps or max(1, (self.inputs.job.sequences or 0) // self.micro_batch)

    @property
    def optimizer(self) -> str:
        """The optimizer in the JSON, or AdamW if the JSON names no optimizer."""
        optimizer = self.inputs.content.get("optimizer")
        named = optimizer.get("type") if isinstance(optimizer, dict) else None
        return named if isinstance(named, str) and named != "auto" else OPTIMIZER

    def assumed(self) -> dict[str, Any]:
        """Return the assumptions for `--json`."""
        job, machine = self.inputs.job, self.inputs.machine
        sequences = self.steps * self.micro_batch
        return {
            "dtype": job.dtype,
            "zero_stage": job.zero.stage,
            "offload_optimizer": job.zero.offload_optimizer.device,
            "offload_param": job.zero.offload_param.device,
            "gradient_checkpointing": job.checkpointing,
            "optimizer": self.optimizer if self.optimizer.lower() in OPTIMIZER_STATES else OPTIMIZER,
            "micro_batch": job.batch or 1,
            "sequences_a_step": sequences,
            "tokens_a_step": sum(self.inputs.lengths) or job.objective.batch(sequences) * self.inputs.seq,
            "reference_model": job.objective.reference,
            "trained_parameters": self.inputs.model.trained or self.inputs.model.parameters,
            "ranks": self.inputs.world,
            "not_counted": self.inputs.model.not_counted,
            "machine": machine and {"name": machine.name, "ranks_a_node": machine.per_node, "memory": machine.memory},
        }

    def lines(self) -> list[str]:
        """Return the assumptions as lines for the user."""
        assumed, machine = self.assumed(), self.inputs.machine
        offloads = [f"{name} on {device}" for name in ("offload_optimizer", "offload_param")
                    if (device := assumed[name]) != "none"]  # fmt: skip
        is_counted = any(name in self.optimizer.lower() for name in ("adam", *OPTIMIZER_STATES))
        other = "" if is_counted else f" (not the JSON's {self.optimizer})"
        assumptions = [
            assumed["dtype"],
            f"ZeRO-{assumed['zero_stage']}",
            *offloads,
            f"gradient checkpointing {'on' if assumed['gradient_checkpointing'] else 'off'}",
            f"{assumed['optimizer']}{other}",
            f"micro-batch {assumed['micro_batch']}",
            f"{assumed['sequences_a_step']} sequence{'s' * (assumed['sequences_a_step'] > 1)} "
            f"({assumed['tokens_a_step']:,} tokens) a step",
            *["a reference model"] * assumed["reference_model"],
            *[f"{self.inputs.model.trained or 0:,} parameters trained"] * (self.inputs.model.trained is not None),
        ]
        if machine:
            limit = machine.usable if self.inputs.memory is None else self.inputs.memory
            assumptions += [
                f"{limit / GIB:.1f} of {machine.memory / GIB:.1f} GiB for tensors",
                f"nodes of {machine.per_node}",
            ]
        return [f"assumed: {'; '.join(assumptions)}", *self.image_lines(), *self.inputs.model.not_counted]

    def image_lines(self) -> list[str]:
        """Return a line about the images in a sequence and the vision tower."""
        tower, images, seq = self.inputs.model.tower, self.inputs.job.images, self.inputs.seq
        if tower is None:
            return []
        line = f"a tower has {tower.layers.parameters:,} of {self.inputs.model.parameters:,} parameters"
        if images is None:
            return [f"{line}; no images are counted: say --images"]
        number, of_each, patches = images
        line += f"; images: {number} of {of_each:,} tokens and {patches:,} patches are {number * of_each / seq:.1%} of "
        batch = self.inputs.job.batch or 1
        line += f"a sequence, and a rank computes {images.of_rank(self.config, batch)} of {batch * number}"
        if self.inputs.machine is None:
            return [line]
        step = self.inputs.job.step(self.config, self.inputs.world, self.inputs.machine.gpus)
        shares = []
        for divides in (True, False):
            config = dataclasses.replace(self.config, divide_media=divides)
            each = dataclasses.replace(step, config=config)
            seconds = tower_seconds(each, self.inputs.machine)
            shares.append(f"{seconds / estimate(each, self.inputs.machine).seconds:.1%}")
        return [f"{line}; the tower takes {shares[0]} of a step's time divided, {shares[1]} undivided"]

    def deepspeed_json(self) -> dict[str, Any]:
        """Return the complete DeepSpeed JSON including the section. "auto" values are left for the Trainer."""
        content = copy.deepcopy(self.inputs.content)
        if self.sequences is not None:
            content["gradient_accumulation_steps"] = self.steps
            if "train_batch_size" in content:
                content["train_batch_size"] = self.steps * self.micro_batch
        return {**content, SECTION: self.section(self.config)}

    def section(self, config: SequenceParallelConfig) -> dict[str, Any]:
        """Return the section for a configuration, without `ulysses` if each pack has its own Ulysses size."""
        section, by_pack = config.section(), self.inputs.lengths and self.inputs.config.ulysses == "auto"
        return {name: value for name, value in section.items() if not (by_pack and name == "ulysses")}

    def flags(self) -> list[str]:
        """Return the Trainer flags required in addition to the JSON, with values that match the JSON."""
        job, content = self.inputs.job, self.deepspeed_json()
        optimizer = content.get("optimizer")
        rate = (optimizer.get("params") or {}).get("lr") if isinstance(optimizer, dict) else None
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
        """Return the JSON for the user with one line per key, followed by instructions for training with the JSON."""
        items = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in self.deepspeed_json().items()]
        given = "train with sp.packs" if self.inputs.lengths else f"give {self.inputs.seq:,} tokens a sequence"
        calls = "call model.gradient_checkpointing_enable(), " * self.inputs.job.checkpointing
        return [
            "ds_config.json:", "", "{", *",\n".join(items).split("\n"), "}", "",
            f"with it a Trainer takes {' '.join(self.flags())}",
            f"a loop of your own: {calls}{given}, on {self.inputs.world} ranks",
            *self.auto_lines(),
        ]  # fmt: skip

    def auto_lines(self) -> list[str]:
        """Return lines with the value assumed for each "auto"."""
        values = ", ".join(f"{key} {shown(value)}" for key, value in self.inputs.filled.items())
        return ["", f'what the configuration leaves "auto" counts as {values}'] if values else []

    def for_json(self) -> dict[str, Any]:
        """Return the entries for `--json`."""
        return {"auto": self.inputs.filled, "assumed": self.assumed(), "deepspeed_json": self.deepspeed_json(),
                "trainer_flags": self.flags()}  # fmt: skip
