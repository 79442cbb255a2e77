"""The DeepSpeed seam: `initialize` prepares a model for sequence parallel training and returns a DeepSpeed engine.

No mpu is handed to DeepSpeed. To ZeRO every rank is a data-parallel rank: states shard over the whole world and
gradients are always the world mean, at every stage; `ds_seqpar.batches` makes that mean the right one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .config import SECTION, SequenceParallelConfig, read_deepspeed
from .errors import ConfigError
from .parallel import SequenceParallel
from .telling import told_once

if TYPE_CHECKING:
    import argparse

# key of the DeepSpeed JSON -> why it breaks the gradient contract or the sharding
REFUSED = {
    "sequence_parallel_size": f'it switches DeepSpeed\'s own groups on; use "{SECTION}": {{"size": ...}}',
    "data_parallel_size": f'it changes the ranks that gradients are averaged over; use "{SECTION}": {{"size": ...}}',
    "tensor_parallel": "AutoTP splits heads by itself; remove it",
    "curriculum_learning": "it cuts sequences after they were sharded; remove it",
    "data_efficiency": "it drops tokens or picks samples by rank; remove it",
}


@told_once
def initialize(
    *,
    model: torch.nn.Module,
    config: str | Path | Mapping[str, Any] | None = None,
    args: argparse.Namespace | None = None,
    sequence_parallel: SequenceParallel | None = None,
    **kwargs: Any,
) -> tuple:
    """What `deepspeed.initialize` returns (engine, optimizer, dataloader, scheduler), for sequence parallel training.

    config: a DeepSpeed JSON's path or its dict, with a "sequence_parallel" section; default `args.deepspeed_config`.
    model: a transformers model, whose attention is patched; or your own, which calls `sp.attention`: then pass that
    SequenceParallel as `sequence_parallel`. `engine.sequence_parallel` is the one in use. `train_batch_size` counts
    sequences. Other arguments go to deepspeed.initialize.
    Raises ConfigError for whatever would break the gradient contract: an `mpu`, AutoTP, pipeline modules,
    `training_data`, and the JSON keys in `REFUSED`.
    """
    content = _read(config, args)
    _refuse(model, content, kwargs)
    import deepspeed  # takes seconds: only those who train wait for it

    deepspeed.init_distributed()
    sp = prepare_model(model, SequenceParallelConfig.from_deepspeed(content), sequence_parallel)
    args = copy.copy(args)
    if getattr(args, "deepspeed_config", None):
        args.deepspeed_config = None
    returned = deepspeed.initialize(args=args, model=model, config=deepspeed_config(content, sp), **kwargs)
    engine = returned[0]
    engine.sequence_parallel = sp
    sp.accumulation_steps = engine.gradient_accumulation_steps()
    return returned


def deepspeed_config(config: str | Path | Mapping[str, Any], sp: SequenceParallel) -> dict[str, Any]:
    """The JSON as DeepSpeed must see it, for callers that need it before `initialize` (zero.Init, HfDeepSpeedConfig).

    DeepSpeed counts a sequence once per rank, so `train_batch_size` (sequences) is multiplied by the SP size.
    Raises ConfigError where the three batch settings do not fit together.
    """
    content = {key: value for key, value in read_deepspeed(config).items() if key != SECTION}
    sequences = content.get("train_batch_size")
    micro, steps = content.get("train_micro_batch_size_per_gpu"), content.get("gradient_accumulation_steps")
    for name, value in (("train_batch_size", sequences), ("train_micro_batch_size_per_gpu", micro),
                        ("gradient_accumulation_steps", steps)):  # fmt: skip
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} must be a whole number from 1; got {value!r}")
    if sequences is not None:
        known = sp.data_size * (micro or 1) * (steps or 1)
        if sequences % known or (micro and steps and sequences != known):
            raise ConfigError(
                f"train_batch_size counts sequences: it must be {'' if micro and steps else 'a multiple of '}{known} = "
                f"{sp.data_size} groups of {sp.size} ranks x micro-batch {micro or 'any'} x accumulation "
                f"{steps or 'any'}; got {sequences}"
            )
        content["train_batch_size"] = sequences * sp.size
    return content


def _read(config: str | Path | Mapping[str, Any] | None, args: argparse.Namespace | None) -> dict[str, Any]:
    config = config if config is not None else getattr(args, "deepspeed_config", None)
    if config is None:
        raise ConfigError(
            "initialize needs a DeepSpeed configuration; got none, pass config= (a path or dict) "
            "or args with --deepspeed_config"
        )
    return read_deepspeed(config)


def _refuse(model: torch.nn.Module, content: dict[str, Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("mpu") is not None:
        raise ConfigError("initialize takes no mpu, whose groups change the gradient scale; leave it out")
    if kwargs.get("training_data") is not None:
        raise ConfigError(
            "initialize takes no training_data, whose loader gives ranks of one sequence different samples; "
            "load batches yourself by sp.data_rank and give them to sp.shard_batches"
        )
    check_settings(content)
    if any(base.__name__ == "PipelineModule" for base in type(model).__mro__):
        raise ConfigError("initialize takes no PipelineModule; give it the plain model")


def check_settings(content: Mapping[str, Any]) -> None:
    """Raises ConfigError for what in a DeepSpeed JSON would break the gradient contract or the sharding."""
    for key, why in REFUSED.items():
        if key in content:
            raise ConfigError(f'the DeepSpeed JSON must not set "{key}" with sequence parallelism: {why}')
    if content.get("gradient_allreduce_op", "mean") != "mean":
        raise ConfigError(
            'the DeepSpeed JSON must not set "gradient_allreduce_op" with sequence parallelism: the loss is scaled for '
            "the mean over ranks; remove it"
        )
    if "gradient_clipping" not in content:
        warnings.warn(
            'the DeepSpeed JSON does not set "gradient_clipping", and DeepSpeed then clips at 1.0; set it (0 for none)',
            stacklevel=4,
        )


def prepare_model(
    model: torch.nn.Module, config: SequenceParallelConfig, given: SequenceParallel | None = None
) -> SequenceParallel:
    """The SequenceParallel to train with; patches a transformers model that is not patched yet.

    Collective over the world where one has to be made. Raises ConfigError where `given`, or what the model is patched
    with, has other settings than `config`, and for models that cannot be patched.
    """
    if not any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        if given is None:
            raise ConfigError(
                "initialize needs a transformers model, or the SequenceParallel that your own model calls; got "
                f"{type(model).__name__} alone, pass sequence_parallel=sp"
            )
        _same(config, given)
        return given
    import hf_integration  # the outermost room: here only because initialize patches by itself

    sp = given or hf_integration.patched_with(model)
    if sp is not None:
        _same(config, sp)
    sp = sp or SequenceParallel(config, heads=hf_integration.heads(model))
    if hf_integration.patched_with(model) is not sp:
        hf_integration.patch_attention(model, sp)
    return sp


def _same(config: SequenceParallelConfig, given: SequenceParallel) -> None:
    """Raises where the JSON's section says something else than the SequenceParallel does."""
    for name, value in vars(config).items():
        if value not in ("auto", getattr(given.config, name)):
            raise ConfigError(
                f'the SequenceParallel of a model must be made from the same settings as the JSON\'s "{SECTION}" '
                f"section; got {name} {getattr(given.config, name)!r} there and {value!r} in the JSON"
            )
