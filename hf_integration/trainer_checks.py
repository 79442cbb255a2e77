"""What in a Trainer's setup would make a sequence parallel run another run: found before training, said in a sentence.

Sources of the rules: the label shift and the divisor of the loss, which must be global (docs/gradient_contract.md), and
what the Trainer does by rank where it would have to be by group of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, TrainingArguments
from transformers.data.data_collator import DataCollatorWithFlattening

from ds_seqpar.agreement import agree
from ds_seqpar.batches import IGNORE, check_batch
from ds_seqpar.errors import ConfigError, InputError, SeqParError

if TYPE_CHECKING:
    from .trainer import SequenceParallelMixin

# field of TrainingArguments -> (is it wrong?, what is needed and what to do)
ARGUMENTS = {
    "parallelism_config": (
        lambda value: value is not None,
        "no ParallelismConfig, whose sequence or context parallelism would shard a second time; remove it, the "
        '"sequence_parallel" section of the DeepSpeed JSON says it all',
    ),
    "label_smoothing_factor": (
        lambda value: value > 0,
        "label_smoothing_factor=0, the Trainer's smoother shifts labels inside each rank's tokens",
    ),
    "average_tokens_across_devices": (
        lambda value: not value,
        "average_tokens_across_devices=True, ranks hold different numbers of label tokens and must divide by their sum",
    ),
    "train_sampling_strategy": (
        lambda value: value == "batch_rebalance",
        "a train_sampling_strategy that gives the ranks of a sequence the same examples; use random, sequential or "
        "group_by_length",
    ),
    "neftune_noise_alpha": (
        lambda value: value is not None,
        "neftune_noise_alpha=None, its noise is scaled by the tokens that a rank sees",
    ),
    "use_liger_kernel": (
        lambda value: value,
        "use_liger_kernel=False, its fused loss was not checked on sharded labels",
    ),
    "auto_find_batch_size": (
        lambda value: value,
        "auto_find_batch_size=False, a rank that runs out of memory would try again without its peers",
    ),
    "torch_compile": (lambda value: value, "torch_compile=False, compiled models were not checked"),
}  # fmt: skip
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "seq_lengths")
LOOKED_AT = 64  # examples of a data set whose lengths are compared before training


def check_arguments(args: TrainingArguments) -> None:
    """Raises ConfigError for TrainingArguments that cannot be combined with sequence parallelism."""
    for field, (is_wrong, needed) in ARGUMENTS.items():
        value = getattr(args, field, None)
        if field in vars(args) and is_wrong(value):
            got = repr(value) if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"
            raise ConfigError(f"sequence parallel training needs {needed}; got {field}={got}")


def check_accelerator(accelerator: Accelerator) -> None:
    """Raises ConfigError for how accelerate was set up, by TrainingArguments or by its launcher."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "0"))
    if not world:
        raise ConfigError(
            "SequenceParallelTrainer needs a process a rank; got no launcher, start the script with deepspeed, "
            "accelerate launch or torchrun"
        )
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
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise ConfigError(f"sequence parallel training needs {ARGUMENTS['parallelism_config'][1]}; got one by launcher")
    if accelerator.dispatch_batches:
        raise ConfigError(
            "sequence parallel training needs dispatch_batches=False, the first rank would hand every rank another "
            "part of a batch; got dispatch_batches=True in accelerator_config"
        )
    if not accelerator.even_batches:
        raise ConfigError(
            "sequence parallel training needs even_batches=True, groups would make unequal numbers of steps and wait "
            "for one another; got even_batches=False in accelerator_config"
        )


def check_trainer(trainer: SequenceParallelMixin) -> None:
    """Raises ConfigError for what a Trainer was given beside its arguments."""
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            "sequence parallel training needs the model's own loss, labels given to compute_loss_func are this rank's "
            "and not shifted; got compute_loss_func, leave it out"
        )
    if not trainer.model_accepts_loss_kwargs:
        raise ConfigError(
            "sequence parallel training needs a model whose forward takes num_items_in_batch and shift_labels, in its "
            f"**kwargs; got {type(unwrapped(trainer.model)).__name__} that does not, or has accepts_loss_kwargs=False, "
            "pass them on to its loss"
        )
    if trainer.compute_metrics is not None and not (trainer.gather_logits or trainer.args.prediction_loss_only):
        raise ConfigError(
            "compute_metrics needs whole logits, and a rank has those of its own tokens; got compute_metrics alone, "
            "pass gather_logits=True (every rank then holds those of whole sequences), or leave it out"
        )
    if isinstance(trainer.data_collator, DataCollatorWithFlattening):
        raise ConfigError(
            "packed documents are not supported yet; got DataCollatorWithFlattening, use a collator that pads"
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft model; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def pad_token_id(trainer: SequenceParallelMixin) -> int | None:
    """The first pad token that somebody knows: the collator's tokenizer, the processing class, the model."""
    sources = getattr(trainer.data_collator, "tokenizer", None), trainer.processing_class, trainer.model.config
    known = [getattr(source, "pad_token_id", None) for source in sources]
    return next((token for token in known if token is not None), None)


def check_model(model: nn.Module) -> None:
    """Raises ConfigError unless the model's loss uses shifted labels and the divisor that it is given.

    Tried on two tokens: a loss that swallows both in its **kwargs would train silently wrong.
    """
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ConfigError(
            "sequence parallel training needs adapters inside the model; got a prompt learning method of peft, which "
            "puts tokens of its own before every rank's, use LoRA"
        )
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        return  # patch_attention says what it needs
    logits, labels = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]]), torch.tensor([[1, 0]])
    shifted = torch.tensor([[0, IGNORE]])
    expected = F.cross_entropy(logits[0, :1], shifted[0, :1]) / 4
    given = {"labels": labels, "vocab_size": 3, "num_items_in_batch": torch.tensor(4), "shift_labels": shifted}
    try:
        loss = model.loss_function(logits=logits, **given)
    except TypeError as reason:
        raise ConfigError(_loss_sentence(f"a loss_function that takes neither ({reason})")) from reason
    if not torch.allclose(loss, expected):
        raise ConfigError(_loss_sentence(f"a loss_function that gives {loss.item():.4f} for {expected.item():.4f}"))


def check_loss(trainer: SequenceParallelMixin, model: nn.Module) -> None:
    """Raises ConfigError on every rank unless a forward of the whole, prepared model returns the sum of the token
    losses on its own shift_labels over num_items_in_batch. One forward of the shortest sequence. Collective."""
    sp, items, vocabulary = trainer.sp, 3.0, unwrapped(trainer.model).config.vocab_size
    ids = torch.arange(sp.multiple)[None] % vocabulary
    shard = sp.shard_batch({"input_ids": ids, "labels": ids.clone()}, training=False)
    shifted = (shard["labels"] * 3 + 1) % vocabulary  # nothing that could be made from labels
    given = {**shard, "shift_labels": shifted, "num_items_in_batch": torch.tensor(items)}
    given = {name: x.to(trainer.args.device) for name, x in given.items()}
    training = model.training
    model.eval()
    with torch.no_grad():
        output = model(**given)
    model.train(training)
    error, loss = None, output["loss"]
    if output.get("logits") is not None:
        logits = output["logits"].float().flatten(0, 1)
        expected = F.cross_entropy(logits, given["shift_labels"].flatten(), reduction="sum") / items
        if not torch.allclose(loss.float(), expected, rtol=1e-2):
            error = ConfigError(
                _loss_sentence(f"a model whose loss is {loss.item():.4f} and not {expected.item():.4f}")
            )
    agree(sp.control_world, "loss of the model", None, error=error)


def _loss_sentence(got: str) -> str:
    return (
        "sequence parallel training needs a model that divides the sum of token losses on shift_labels by "
        f"num_items_in_batch; got {got}, pass both on to transformers' loss"
    )


def data_error(trainer: SequenceParallelMixin) -> SeqParError | None:
    """What shows in some examples of the data sets: packing, left padding, lengths that nobody pads."""
    evaluated = trainer.eval_dataset
    evaluated = evaluated if isinstance(evaluated, dict) else {"": evaluated}
    for dataset in (trainer.train_dataset, *evaluated.values()):
        if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and len(dataset):
            try:
                _try_examples(trainer, dataset)
            except Exception as reason:
                return as_error("reading the data set failed", reason)
    return None


def _try_examples(trainer: SequenceParallelMixin, dataset: Any) -> None:
    """Collates the shortest and the longest of some examples, as a batch may meet them."""
    examples = [dataset[i] for i in range(0, len(dataset), max(1, len(dataset) // LOOKED_AT))][:LOOKED_AT]
    if packed := [name for name in PACKED if isinstance(examples[0], Mapping) and name in examples[0]]:
        raise ConfigError(
            f"packed documents are not supported yet; got a data set with {packed[0]}, give one document an example"
        )
    by_length = {_length(example): example for example in examples}
    extremes = [by_length[length] for length in sorted({min(by_length), max(by_length)})]
    together = max(trainer.args.per_device_train_batch_size, trainer.args.per_device_eval_batch_size) > 1
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
    for batch in [extremes] if together else [[example] for example in extremes]:
        try:
            collated = collate(batch)
        except SeqParError:
            raise
        except Exception as reason:
            raise ConfigError(
                f"examples of different lengths need a collator that pads; got {min(by_length)} to {max(by_length)} "
                f"tokens and {name_of(trainer.data_collator.collator)}, which raised {type(reason).__name__}, use "
                "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            ) from reason
        check_batch(trainer.sp, collated, causal=True)


def _length(example: object) -> int:
    return len(example["input_ids"]) if isinstance(example, Mapping) and "input_ids" in example else 0


def name_of(collator: object) -> str:
    return getattr(collator, "__name__", type(collator).__name__)


def as_error(what: str, reason: Exception) -> SeqParError:
    """An exception as one that ranks can tell one another."""
    if isinstance(reason, SeqParError):
        return reason
    error = InputError(f"{what}, {type(reason).__name__}: {reason}".replace("\n", " "))
    error.__cause__ = reason
    return error
