"""Check a Trainer's setup before training, and reject settings that would change results.

Labels must be shifted, and losses divided, globally (see docs/how_it_works.md). Many steps that the Trainer performs
once per rank must happen once per group of ranks that share a sequence. Settings that only support counting by rank
raise an error. Errors that are the same on every rank are raised immediately. Errors that may occur on a single rank,
for example in its data, are returned, and all ranks then raise them together, so that no rank waits for another.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError, InputError, SeqParError, as_seqpar_error
from ds_seqpar.core.runtime.groups import all_ranks
from ds_seqpar.data.loader import Loader
from ds_seqpar.deepspeed import counts
from ds_seqpar.deepspeed.config import DeepSpeedJson

from ..compat import CALLED, TRL_BASE, check_calls
from ..families import patch_of, unwrapped
from ..inputs import MEDIA
from ..model import forward
from .rollouts import ROLLOUTS, base_of_trl, check_row

# by field of TrainingArguments: (wrong value, needed value and reason)
ARGUMENTS = {
    "average_tokens_across_devices": (
        False,
        "average_tokens_across_devices=True, ranks hold different numbers of label tokens and must divide by their sum",
    ),
    "predict_with_generate": (True, "predict_with_generate=False, it would generate from a part"),
    "eval_use_gather_object": (True, "eval_use_gather_object=False, results are gathered as tensors"),
    "auto_find_batch_size": (
        True,
        "auto_find_batch_size=False, a rank that runs out of memory would try again without its peers",
    ),
    "activation_offloading": (
        True,
        "activation_offloading=False, which moves what attention saves; set sequence_parallel.offload_checkpoints",
    ),
}
# by setting of accelerate's data loaders: (needed value, reason)
BATCHING = {
    "dispatch_batches": (False, "the first rank would hand every rank another part of a batch"),
    "split_batches": (False, "batch sizes are those of a group of ranks"),
    "even_batches": (True, "groups would make unequal numbers of steps and wait for one another"),
}
PREFERENCES = ("DPOTrainer", "KTOTrainer")
LOSS_OF_WHOLE = (*PREFERENCES, "RewardTrainer", *ROLLOUTS)  # Trainers whose compute_loss gets whole outputs
SUPPORTED = ("SFTTrainer", *LOSS_OF_WHOLE, TRL_BASE)  # trl trainers that may be extended
TOKENS = {"input_ids", "inputs_embeds", "labels"}  # a tokenized example has one of these columns
# fields of TrainingArguments that must be equal on all ranks, since they determine training and communication
EQUAL_ARGUMENTS = (
    *("seed", "data_seed", "max_steps", "num_train_epochs", "train_sampling_strategy", "ignore_data_skip"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("dataloader_drop_last", "bf16", "fp16", "gradient_checkpointing", "max_grad_norm", "weight_decay"),
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("logging_strategy", "logging_steps", "logging_first_step", "save_strategy", "save_steps", "save_only_model"),
    "enable_jit_checkpoint",
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "load_best_model_at_end"),
)


def check_kind(trainer_class: type) -> None:
    """Raise ConfigError for a class that extends an unsupported kind of Trainer, or a trl trainer that counts ranks."""
    for base in trainer_class.__mro__:
        name, library = base.__name__, base.__module__.partition(".")[0]
        if library == "trl" and name.endswith("Trainer") and name not in SUPPORTED:
            raise ConfigError(
                f"sequence parallel training needs transformers' Trainer, or trl's {', '.join(SUPPORTED[:-1])}; got a "
                f"{name}, compute its loss in a loop of your own with share_sequences (docs/own_loop.md, "
                "examples/grpo_loop.py, examples/reward_loop.py)"
            )
        if library == "trl" and name in CALLED:
            check_calls(base)


def check_arguments(args: TrainingArguments) -> None:
    """Raise ConfigError for TrainingArguments that cannot be combined with sequence parallelism."""
    unmet = []
    for field, (wrong, needed) in ARGUMENTS.items():
        value = getattr(args, field, None)
        if field in vars(args) and (bool(value) if isinstance(wrong, bool) else value) == wrong:
            got = repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
            unmet.append((needed, f"{field}={got}"))
    _refuse_all(unmet)


def _refuse_all(unmet: list[tuple[str, str]]) -> None:
    """Raise a single ConfigError for all (needed, given) pairs."""
    if unmet:
        needed, got = zip(*unmet, strict=True)
        raise ConfigError(f"sequence parallel training needs {', and '.join(needed)}; got {', '.join(got)}")


def check_json(args: TrainingArguments) -> None:
    """Raise ConfigError for an invalid DeepSpeed JSON (a file or a dict).

    Errors that transformers would ignore are reported too.
    """
    config = args.deepspeed or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if isinstance(config, Mapping) or (isinstance(config, str | os.PathLike) and os.path.isfile(config)):
        DeepSpeedJson.read(config).check()


def count_by_rank(config: Any, sp: SequenceParallel) -> None:
    """Allow the `train_batch_size` in a JSON to count sequences, as in `initialize`, or ranks, as in transformers.

    Raises ConfigError for any other `train_batch_size`, and for JSON values that differ from TrainingArguments.

    Args:
        config: transformers' config object, with "auto" filled in.
        sp: The SequenceParallel of the model.
    """
    if any(not x.startswith("- ds train_batch_size=") for x in config.mismatches):
        got = ", ".join(x.removeprefix("- ds ").replace(" vs hf ", " for ") for x in config.mismatches)
        raise ConfigError(
            f'the DeepSpeed JSON needs the values of TrainingArguments, or "auto" in their places; got {got}, write it'
        )
    counts.count_by_rank(config.config, sp)
    config.mismatches = []


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise ConfigError for an Accelerator with unsupported settings, from TrainingArguments or a launcher."""
    world = _world_size()
    if accelerator.num_processes != world:
        raise ConfigError(
            f"the Trainer must see all ranks; it sees {accelerator.num_processes} of {world}, on a machine without "
            "GPUs pass TrainingArguments(use_cpu=True)"
        )
    if accelerator.state.deepspeed_plugin is None:
        raise ConfigError(
            "SequenceParallelTrainer needs DeepSpeed; got none, pass TrainingArguments(deepspeed=...) a JSON with a "
            '"sequence_parallel" section, or use accelerate launch --use_deepspeed'
        )
    wrong = [(name, *x) for name, x in BATCHING.items() if bool(getattr(accelerator, name)) is not x[0]]
    _refuse_all(
        [(f"{name}={needed}, {why}", f"{name}={not needed} in accelerator_config") for name, needed, why in wrong]
    )


def _world_size() -> int:
    """Return the number of ranks. Raise ConfigError if no launcher started the ranks."""
    world = all_ranks().size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "0"))
    if not world:
        got = "no launcher, start the script with deepspeed, accelerate launch or torchrun"
        if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set only by accelerate's launcher
            got = "one of accelerate launch alone, add --use_deepspeed, --num_processes and --deepspeed_config_file"
        raise ConfigError(f"SequenceParallelTrainer needs DeepSpeed and a process a rank; got {got}")
    return world


def text_of(trainer: Any, batch: Any) -> Any:
    """Return a batch without its media. Rows of prompts are returned unchanged.

    Raises an error if the model does not support media, or if a prompt with media was truncated.
    """
    if not isinstance(batch, Mapping):
        rows = [row for row in batch if isinstance(row, Mapping)] if isinstance(batch, list) else []
        images = [row.get("images") or row.get("image") for row in rows]
        forward.text_of(trainer.model, {"images": next(filter(None, images), None)})
        return batch
    given = [name for name in MEDIA if batch.get(name) is not None]
    if given and base_of_trl(type(trainer), *PREFERENCES) and not batch["completion_mask"].any(1).all():
        raise InputError(
            f"rows with {given[0]} need their whole prompts and some of their answers; got one without an answer under "
            f"max_length={trainer.args.max_length}, raise it, or set it to None"
        )
    return forward.text_of(trainer.model, batch)


def has_custom_loss(trainer: Any) -> bool:
    """Return whether the loss is computed from whole outputs.

    Whole outputs are needed if the model's own forward may add to the loss, or if `changes_loss` is true.
    """
    patch = patch_of(unwrapped(trainer.model))
    return changes_loss(trainer) or (patch is not None and bool(patch.above))


def changes_loss(trainer: Any, but: Collection[str] = ()) -> bool:
    """Return whether the Trainer uses a loss other than the model's own loss.

    Possible causes are label smoothing, a compute_loss_func, a user-defined compute_loss, or a trl trainer that trains
    on preferences or rollouts.

    Args:
        trainer: The Trainer.
        but: Names of trl trainers to ignore.
    """
    if trainer.args.label_smoothing_factor > 0 or getattr(trainer, "compute_loss_func", None) is not None:
        return True
    libraries = "transformers", "trl", "hf_integration"
    classes = [base for base in type(trainer).__mro__ if "compute_loss" in vars(base)]
    of_whole = {*LOSS_OF_WHOLE}.difference(but)
    return any(base.__module__.partition(".")[0] not in libraries or base.__name__ in of_whole for base in classes)


def unseen_file() -> ConfigError:
    """Return the error for a rank that cannot see the log-probability file written by trl's first rank."""
    return ConfigError(
        "precompute_ref_log_probs needs a data set in files that all ranks see, beside which the first rank writes "
        "results; got one in memory or on a disk that is not shared, use save_to_disk and load_from_disk"
    )


def loader_error(loader: Any) -> ConfigError | None:
    """Return the error for a loader from a user-defined get_train_dataloader or get_eval_dataloader, or None."""
    if not isinstance(loader, Loader):
        return None
    return ConfigError(
        "the Trainer deals batches to groups by itself, and must know where an epoch ends; got a loader of sp.loader, "
        "return self.accelerator.prepare(DataLoader(...)) of the whole data set"
    )


def _datasets(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, data set), for training and evaluation."""
    eval_datasets = trainer.eval_dataset
    eval_datasets = eval_datasets if isinstance(eval_datasets, dict) else {"": eval_datasets}
    yield "training", trainer.train_dataset
    for name, dataset in eval_datasets.items():
        yield f"evaluation {name}".strip(), dataset


def settings(trainer: Any) -> dict[str, object]:
    """Return the settings that must be equal on all ranks, since each rank updates only a part of the optimizer."""
    configs = [vars(base) for base in type(trainer.args).__mro__ if base.__module__.startswith("trl.")]
    of_trl = {name for config in configs for name in config.get("__annotations__", ())} - {"dataset_num_proc"}
    names = [*EQUAL_ARGUMENTS, *sorted(of_trl)]
    return {name: getattr(trainer.args, name, None) for name in names} | {
        "group_generation_over": trainer.group_generation_over,
    }


def lengths(trainer: Any) -> dict[str, int | None]:
    """Return each data set's number of examples by name, or None for a data set without a length.

    With unequal numbers, ranks would take different numbers of steps.
    """
    return {f"{name} examples": len(dataset) if has_length(dataset) else None for name, dataset in _datasets(trainer)}


def columns_error(trainer: Any) -> ConfigError | None:
    """Return the error for a `datasets` data set without token columns, since the Trainer would remove every column."""
    if base_of_trl(type(trainer), *SUPPORTED) or not trainer.args.remove_unused_columns:
        return None  # trl's trainers and image collators tokenize
    columns = (getattr(dataset, "column_names", None) for _, dataset in _datasets(trainer))
    return next(filter(None, (text_error(dict.fromkeys(x)) for x in columns if isinstance(x, list))), None)


@dataclasses.dataclass(frozen=True)
class CheckedCollator:
    """A collate_fn for a loader that reports errors in examples when their batch is made.

    Examples are not tested earlier, since data sets and collators may have state, and testing would change losses.
    """

    collate: Any

    def __call__(self, examples: Any) -> Any:
        rows = examples if isinstance(examples, list) else [examples]
        try:
            batch = self.collate(examples)
        except SeqParError:
            raise
        except Exception as reason:
            # the Trainer's collator wraps the user's collator
            collate = getattr(self.collate, "data_collator", self.collate)
            name = getattr(collate, "__name__", type(collate).__name__)
            unequal = len({sum(len(x) for x in _ids(row) if hasattr(x, "__len__")) for row in rows}) > 1
            hint = " (examples of different lengths need one that pads, and a tokenizer.pad_token)" * unequal
            if isinstance(reason, KeyError):
                hint += " (columns that the model does not take need remove_unused_columns=False)"
            raise text_error(rows[0]) or as_seqpar_error(f"making a batch by {name}{hint} failed", reason) from reason
        if isinstance(batch, list):  # rows of prompts
            check_row(rows[0])
        elif isinstance(batch, Mapping) and not TOKENS.intersection(batch) and (error := text_error(rows[0])):
            raise error
        return batch


def text_error(example: object) -> ConfigError | None:
    """Return the error for an example that was not tokenized, or None."""
    if not isinstance(example, Mapping) or TOKENS.intersection(example) or _ids(example):
        return None
    return ConfigError(
        f"sequence parallel training needs examples with input_ids, and labels (or a collator that makes them); "
        f"got {', '.join(sorted(map(str, example))) or 'no column'} alone, tokenize the data set first, and use "
        "DataCollatorForLanguageModeling(tokenizer, mlm=False), or set remove_unused_columns=False for a collator that "
        "reads columns which the model does not take"
    )


def _ids(example: object) -> list[Any]:
    """Return the id columns of an example. trl's preference data has columns such as "prompt_ids" and "chosen_ids"."""
    return [x for name, x in example.items() if name.endswith("_ids")] if isinstance(example, Mapping) else []
