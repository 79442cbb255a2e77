"""Create planner jobs for transformers models and for Trainers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
)

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.base.log import log_once
from ds_seqpar.data.packing import PackingCollator, Packs
from ds_seqpar.deepspeed.config import DeepSpeedJson

from ..look.known import windows
from ..look.sizes import model_sizes
from ..model.checkpointing import layers_of

if TYPE_CHECKING:
    from ds_seqpar.planner.request import Job, Objective


IDS = "input_ids"
ROWS = 1000  # number of rows of a column to read at once


def job_of(model: PreTrainedModel, job: Job) -> Job:
    """Add a model's sizes to a planner job.

    Args:
        model: A transformers model, on any device, whole or sharded by ZeRO-3.
        job: The job without a model.

    Returns:
        The job with the model's sizes, window and checkpointing. If the sizes cannot be determined, the job has neither
        a model nor a length, so nothing is planned.
    """
    try:
        sizes, window_sizes = model_sizes(model), set(windows(model))
    except ConfigError as error:
        log_once(f"sequence_parallel: nothing can be planned for this model: {error}")
        return dataclasses.replace(job, model=None, seq=None, uncounted=str(error))
    return dataclasses.replace(
        job,
        model=sizes,
        window=window_sizes.pop() if len(window_sizes) == 1 else None,
        checkpointing=job.checkpointing or any(bool(layer.gradient_checkpointing) for layer in layers_of(model)),
    )


def job_of_trainer(trainer: Trainer, content: Mapping[str, Any]) -> Job:
    """Return the planner job of a Trainer, with its longest sequence and its values for "auto" in the JSON.

    A sequence is a row of a batch, or the whole batch if a collator packs documents.
    """
    from ds_seqpar.planner.request import Job

    args, dataset, collator = trainer.args, trainer.train_dataset, trainer.data_collator
    batch_size, documents = args.per_device_train_batch_size, _longest_pack(dataset)
    seq = longest_example(dataset, args.length_column_name)
    packed = isinstance(collator, PackingCollator | DataCollatorWithFlattening)
    if packed and seq and not documents:
        documents = (seq,)
    return dataclasses.replace(
        Job.of(DeepSpeedJson.read(content)),
        seq=sum(documents) * batch_size or seq,
        documents=documents * batch_size,
        batch=1 if documents else batch_size,
        steps=args.gradient_accumulation_steps,
        sequences=None,  # the Trainer's batch depends on the number of groups, which the planner must not change
        dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        checkpointing=bool(args.gradient_checkpointing),
        objective=objective_of(trainer),
    )


def objective_of(trainer: Trainer) -> Objective:
    """Return the computations in a trl trainer, based on the trainer's class and arguments.

    A prompt counts once for each row that contains it.
    """
    from ds_seqpar.planner.request import TRAINERS, Objective

    args: Any = trainer.args
    names = (base.__name__ for base in trainer.__class__.__mro__ if base.__module__.startswith("trl."))
    kinds = (name.removesuffix("Trainer").lower() for name in names)
    sees_logits = args.label_smoothing_factor or trainer.compute_loss_func is not None
    known = {**TRAINERS, "sft": Objective(head="logits" if sees_logits else "fused")}
    objective = next((known[kind] for kind in kinds if kind in known), Objective())
    generates = objective.generated and not args.use_vllm
    return dataclasses.replace(
        objective,
        triton=not args.use_cpu,
        reference=getattr(trainer, "ref_model", None) is not None,
        generated=args.per_device_train_batch_size * args.steps_per_generation if generates else 0,
        completion=args.max_completion_length if generates else 0,
    )


def _longest_pack(dataset: Any) -> tuple[int, ...]:
    """Return the document lengths of the longest pack, or () if the data set has no packs."""
    if not isinstance(dataset, Packs):
        return ()
    return max((tuple(dataset.lengths[document] for document in pack) for pack in dataset.packs), key=sum)


def longest_example(dataset: Any, column: str) -> int | None:
    """Return the number of tokens of the longest example of a `datasets.Dataset`, or None for any other data set.

    The number comes from the length column or from input_ids. For all other data sets, every example would have to be
    created to count its tokens.
    """
    library = sys.modules.get("datasets")  # if `datasets` is not imported, the data set does not come from it
    if library is None or not isinstance(dataset, library.Dataset) or not len(dataset):
        return None
    if column in dataset.column_names:
        return max(dataset.with_format(None)[column])  # without running the user's transform
    import pyarrow.compute as arrow
    from pyarrow import types

    if IDS not in dataset.column_names:
        return None
    column_type = dataset.data.schema.field(IDS).type
    if not (types.is_list(column_type) or types.is_large_list(column_type)):
        return None
    lists = dataset.select_columns([IDS]).with_format("arrow").iter(ROWS)
    return max(arrow.max(arrow.list_value_length(rows[IDS])).as_py() for rows in lists)
