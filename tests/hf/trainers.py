"""Small Trainers, plain and sequence parallel, over documents of many lengths."""

import dataclasses
import gc
import multiprocessing

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import dataloader
from transformers import Trainer, TrainingArguments

from hf_integration import SequenceParallelTrainer
from tests.hf.llama import IGNORE, small

STEPS = 12


def documents(count, seed=5):
    """Examples of 9 to 40 tokens that count up, whose first labels, up to nearly all of them, do not count."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(9, 41, (1,), generator=generator))
        first, step = torch.randint(1, 64, (2,), generator=generator).tolist()
        ids = (first + (1 + step % 2) * torch.arange(length)) % 63 + 1
        labels = ids.clone()
        labels[: int(torch.randint(0, length, (1,), generator=generator))] = IGNORE
        found.append({"input_ids": ids, "labels": labels})
    return found


def collate(examples):
    """Pads on the right to the longest, as a tokenizer's collator does."""
    ids, labels = ([example[name] for example in examples] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
    }


def settings(section, stage):
    """A DeepSpeed JSON as the Trainer likes it; section None: no sequence parallelism."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": "auto"},
        "steps_per_print": 2**30,
        **({"sequence_parallel": section} if section else {}),
    }


def split():
    """What changes `settings` of ZeRO-3 so that no rank keeps the parameters of a small model."""
    zero = settings(None, 3)["zero_optimization"]
    return {"zero_optimization": {**zero, "stage3_param_persistence_threshold": 0}}


def fields(sequences, section=None, stage=2, deepspeed_changes=None, **changes):
    """Of TrainingArguments; sequences: a device's in training, a group's with sequence parallelism."""
    return {
        "per_device_train_batch_size": sequences,
        "per_device_eval_batch_size": sequences,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "deepspeed": {**settings(section, stage), **(deepspeed_changes or {})},
        **changes,
    }


def arguments(folder, sequences, *given, **changes):
    """TrainingArguments with these `fields`."""
    return TrainingArguments(str(folder), **fields(sequences, *given, **changes))


def make(folder, sequences, section=None, stage=2, model=None, parts=None, kind=None, **changes):
    """A Trainer, sequence parallel where there is a section; `parts` are its own arguments, `changes` of its args."""
    given = {"train_dataset": documents(96), "eval_dataset": documents(12, seed=9), "data_collator": collate}
    kind = kind or (SequenceParallelTrainer if section else Trainer)
    args = arguments(folder, sequences, section, stage, **changes)
    return kind(model or small(pad_token_id=0), args, **{**given, **(parts or {})})


def end_workers():
    """Ends the workers of all loaders. Torch waits 5 s for those of one that is collected in a circle: their queues
    go first, so they are never told to end."""
    if multiprocessing.active_children():
        for x in gc.get_objects():
            if issubclass(type(x), dataloader._MultiProcessingDataLoaderIter):  # `isinstance` asks every object
                x._shutdown_workers()


def mean_of_steps(model, examples, a_step):
    """The evaluation loss: of each step the mean token loss, weighted by its sequences."""
    total = 0.0
    for first in range(0, len(examples), a_step):
        losses, tokens = 0.0, 0
        for example in examples[first : first + a_step]:
            with torch.no_grad():
                logits = model(example["input_ids"][None]).logits[0, :-1]
            targets = example["labels"][1:]
            losses += float(torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum"))
            tokens += int((targets != IGNORE).sum())
        total += losses / tokens * len(examples[first : first + a_step])
    return total / len(examples)


@dataclasses.dataclass
class Run:
    """What a run logged, by name, and what it counted."""

    logs: dict
    counts: tuple

    def __getitem__(self, name):
        return self.logs[name]


def trained(trainer, **how):
    """Trains, and reads the log."""
    metrics = trainer.train(**how).metrics
    state, logs = trainer.state, {}
    for entry in state.log_history:
        for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
            if name in entry:
                logs.setdefault(name, []).append(entry[name])
    samples = round(metrics["train_samples_per_second"] * metrics["train_runtime"])
    counts = (state.global_step, state.epoch, state.num_input_tokens_seen, state.max_steps, samples)
    return Run(logs, counts)
