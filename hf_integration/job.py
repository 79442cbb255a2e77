"""What the planner must know of a transformers model that is to be trained, and of a Trainer's data."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import DataCollatorWithFlattening, PreTrainedModel, TrainingArguments

from ds_seqpar.errors import ConfigError

from .checkpointing import layers_of
from .collator import PackingCollator, Packs
from .families import windows
from .numbers import counted

if TYPE_CHECKING:
    from ds_seqpar.planner.auto import Job

IDS = "input_ids"
ROWS = 1000  # of a column, at once


def job_of(model: PreTrainedModel, job: Job) -> Job:
    """The same with the model's numbers, where they are known; without them nothing can be planned."""
    try:
        numbers = counted(model)
    except ConfigError:
        return dataclasses.replace(job, model=None, seq=None)
    its = set(windows(model))
    return dataclasses.replace(
        job,
        model=numbers,
        window=its.pop() if len(its) == 1 else None,
        checkpointing=job.checkpointing or any(bool(layer.gradient_checkpointing) for layer in layers_of(model)),
    )


def job_of_trainer(args: TrainingArguments, content: Mapping[str, Any], dataset: Any, collator: Any) -> Job:
    """What a Trainer fills in where the JSON says "auto", and the longest sequence that its data says it has: a row of
    a batch, which is the whole batch where a collator lays documents end to end."""
    from ds_seqpar.planner.auto import Job

    together, documents = args.per_device_train_batch_size, _longest_pack(dataset)
    seq = longest(dataset, args.length_column_name)
    packed = isinstance(collator, PackingCollator | DataCollatorWithFlattening)
    if packed and seq and not documents:
        documents = (seq,)
    return dataclasses.replace(
        Job.of(content),
        seq=sum(documents) * together or seq,
        documents=documents * together,
        batch=1 if documents else together,
        steps=args.gradient_accumulation_steps,
        sequences=None,  # a Trainer trains as many as it has groups, so groups must not depend on what is predicted
        dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        checkpointing=bool(args.gradient_checkpointing),
    )


def _longest_pack(dataset: Any) -> tuple[int, ...]:
    """The lengths of its documents; () where the data set is not of packs."""
    if not isinstance(dataset, Packs):
        return ()
    return max((tuple(dataset.lengths[document] for document in pack) for pack in dataset.packs), key=sum)


def longest(dataset: Any, column: str) -> int | None:
    """Tokens of the longest example of a data set that knows them without making its examples: one of `datasets` with
    a column of lengths, or of input_ids, which is read without its numbers. None for any other."""
    library = sys.modules.get("datasets")  # who has none of its data sets need not wait for it
    if library is None or not isinstance(dataset, library.Dataset) or not len(dataset):
        return None
    if column in dataset.column_names:
        return max(dataset[column])
    import pyarrow.compute as arrow
    from pyarrow import types

    if IDS not in dataset.column_names:
        return None
    kind = dataset.data.schema.field(IDS).type
    if not (types.is_list(kind) or types.is_large_list(kind)):
        return None
    lists = dataset.select_columns([IDS]).with_format("arrow").iter(ROWS)
    return max(arrow.max(arrow.list_value_length(rows[IDS])).as_py() for rows in lists)
