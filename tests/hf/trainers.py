"""Trainers, plain and sequence parallel, on the same data: `compare` asserts that both log the same.

To add a case, write a row of a table and give the table to `compare`:

    CASES = {"adapters": case("DPO", lora, stage=3, resume_at=2), "full": case("SFT", packing=True)}
    compare(tmp_path, CASES, (2, 2), (4, 2))

`case` says what a case may be. Ranks are sent a function of a case by its name, so it is one of a module.
"""

import contextlib
import dataclasses
import gc
import importlib
import multiprocessing
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, load_from_disk
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import dataloader
from transformers import AutoModelForSequenceClassification, ByT5Tokenizer, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_integration import SequenceParallelMixin, SequenceParallelTrainer
from hf_integration.families import unwrapped
from hf_integration.model.forward import patch_of
from hf_integration.trainer.job import objective_of
from tests.dist.ranks import not_refused, refusal
from tests.hf import rollouts
from tests.hf.llama import IGNORE, small
from tests.launch import on_trainer_ranks as on_ranks

STEPS = 12
# names of figures: of every class; of time and memory; that are exact; that are differences of sums of a size of 100
FIGURES = ("loss", "grad_norm", "learning_rate", "eval_loss")
OF_TIME = ("runtime", "per_second", "step_time", "memory_gib")
EXACT = ("learning_rate", "epoch", "step", "num_tokens", "num_input_tokens_seen")
SUMS = ("rewards", "kl", "margin")


# ---- data, models, arguments


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


def rows_of(examples):
    """A data set of these, as trl wants it."""
    return Dataset.from_list([{name: x.tolist() for name, x in example.items()} for example in examples])


def texts(kind, count, seed):
    """Prompts and answers of many lengths for DPO, KTO or Reward."""
    draw = torch.Generator().manual_seed(seed)

    def text(least, most):
        length = int(torch.randint(least, most, (), generator=draw))
        return "".join(chr(97 + x) for x in torch.randint(0, 26, (length,), generator=draw).tolist())

    columns = {"prompt": (1, 12), "chosen": (1, 30), "rejected": (1, 20)}
    rows = [{name: text(*ends) for name, ends in columns.items()} for _ in range(count)]
    if kind == "KTO":
        rows = [{"prompt": x["prompt"], "completion": x["chosen"], "label": i % 3 > 0} for i, x in enumerate(rows)]
    if kind == "Reward":
        rows = [{**x, "margin": float(torch.rand((), generator=draw))} for x in rows]
    return Dataset.from_list(rows)


def save_examples(folder):
    """What cases of preferences read: trl keeps beside files what it computes before, and of no other data set."""
    for kind in ("DPO", "KTO", "Reward"):
        texts(kind, 48, 5).save_to_disk(f"{folder}/{kind} train")
        texts(kind, 9, 9).save_to_disk(f"{folder}/{kind} eval")


def policy(seed=0, **changes):
    return small(seed, vocab_size=300, pad_token_id=0, **changes)


def judge():
    config = policy().config
    config.num_labels = 1
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config)


def reference():
    return {"ref_model": policy(seed=1)}


def lora(task="CAUSAL_LM", **changes):
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": task, **changes}
    return {"peft_config": peft.LoraConfig(**given)}


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


# ---- a Trainer of any class


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a case of a kind is by default.

    own: name -> of a folder, what makes the Trainer's own argument; args: of its configuration; within: the absolute
    difference that figures may have, where they may be next to nothing; alone: whether one plain rank has the sequences
    of all groups, because the plain evaluation loss weighs ranks alike, however many tokens each has.
    """

    own: dict
    args: dict
    within: float = 1e-12
    alone: bool = False


def _preferences(kind):
    data = {
        f"{x}_dataset": lambda folder, x=x: load_from_disk(folder.with_name(f"{kind} {x}")) for x in ("train", "eval")
    }
    own = {"model": lambda _: judge() if kind == "Reward" else policy(), **data, "processing_class": _tokenizer}
    # an epsilon as large as gradients: else the first steps are made of the signs of what rounding has left
    steps = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 5, "gradient_accumulation_steps": 1}
    return Kind(own, {**steps, "bf16": False, "adam_epsilon": 1e-2}, within=1e-6)


def _tokenizer(_):
    return ByT5Tokenizer(extra_ids=0)


_TRAINER = {
    "model": lambda _: small(pad_token_id=0),
    "train_dataset": lambda _: documents(96),
    "eval_dataset": lambda _: documents(12, seed=9),
    "data_collator": lambda _: collate,
}
_SFT = {
    "model": lambda _: policy(),
    "train_dataset": lambda _: rows_of(documents(48)),
    "eval_dataset": lambda _: rows_of(documents(8, seed=9)),
    "processing_class": _tokenizer,
}
_ROLLOUTS = {
    "model": lambda _: rollouts.policy(),
    "train_dataset": lambda _: rollouts.prompts(24),
    "eval_dataset": lambda _: rollouts.prompts(4, 9),
    "processing_class": _tokenizer,
    "reward_funcs": lambda _: [rollouts.letters, rollouts.odd],
    "between": lambda _: [rollouts.Keyed],
}
ROLLS_OUT = ("GRPO", "RLOO")
_GENERATED = {"num_generations": 2, "max_completion_length": rollouts.LENGTH, "temperature": 0.9}
KINDS = {
    "Trainer": Kind(_TRAINER, {}, alone=True),
    "SFT": Kind(_SFT, {"max_steps": 2, "bf16": False, "eval_strategy": "steps", "eval_steps": 1}, alone=True),
    **{name: _preferences(name) for name in ("DPO", "KTO", "Reward")},
    **{name: Kind(_ROLLOUTS, {"max_steps": 2, "bf16": False, **_GENERATED}, 1e-5) for name in ROLLS_OUT},
}


def make(folder, sequences, section=None, stage=2, model=None, parts=None, kind="Trainer", drops=(), **changes):
    """A Trainer, sequence parallel where there is a section.

    Args:
        folder: Where it writes. Beside it lie the data of preferences, and the reference of rollouts.
        sequences: As of `fields`.
        section: "sequence_parallel" of the DeepSpeed JSON.
        stage: Of ZeRO.
        model: In place of the kind's.
        parts: The Trainer's own arguments; "before" and "between": classes before the mixin, and behind it.
        kind: One of `KINDS`, or a class or function of one's own that takes what the Trainer does.
        drops: Columns of its data sets that are left out.
        **changes: Of its arguments.
    """
    name = kind if isinstance(kind, str) else "Trainer"
    if name != "Trainer":
        torch.manual_seed(3)  # of adapters
    own = {**({"model": model} if model else {}), **(parts or {})}
    own |= {part: made(Path(folder)) for part, made in KINDS[name].own.items() if part not in own}
    before, between = own.pop("before", ()), own.pop("between", ())
    if drops:
        own |= {name: x.remove_columns(drops) for name, x in own.items() if name.endswith("_dataset")}
    given = fields(sequences, section, stage, **{**KINDS[name].args, **changes})
    if name == "Trainer":
        plain, config = (Trainer if kind == name else kind), TrainingArguments
    else:
        import trl

        plain, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
        del given["deepspeed"]["train_batch_size"]  # DeepSpeed counts ranks while a reference is loaded in parts
    if name in ROLLS_OUT:
        own["model"].config._name_or_path = str(Path(folder).with_name("reference"))  # from where trl loads one
    shared = [SequenceParallelMixin] if section and kind == name else []
    if bases := [*before, *shared, *between]:
        plain = SequenceParallelTrainer if bases == shared and plain is Trainer else type("Own", (*bases, plain), {})
    return plain(args=config(str(folder), **given), **own)


# ---- cases


def case(kind="Trainer", parts=dict, **changes):
    """A case of `compare`.

    Args:
        kind: One of `KINDS`.
        parts: The Trainer's own arguments where they are not the kind's, as of `make`; or what makes them on a rank.
        **changes: Of the Trainer's configuration, `stage` and `deepspeed_changes` of the JSON, and
            batch: sequences in a micro-step of all ranks;
            section: settings of sequence parallelism beside the size;
            ours: as parts, what the plain Trainer is not given;
            resume_at: the step of the checkpoint from which a second Trainer goes on (True: the last), with `again`
            in place of other arguments; what it logs, and evaluates with its best model, is compared too;
            then: of a Trainer that has trained, what else is compared;
            only: the figures of the log that are compared, where not all of them are;
            rel: the relative difference that figures may have, 1e-5; or name -> that of a figure.
    """
    return {"kind": kind, "parts": parts, **changes}


_OF_OURS = ("ours", "section", "rel")
_OF_ORACLE = ("ours", "resume_at", "again", "then", "only", "rel")


def build(folder, given, size=None, batch=4):
    """The Trainer of a case: plain, or one in which `size` ranks share sequences."""
    given = {"section": {}, "batch": batch, **given}
    unset_hf_deepspeed_config()  # of a run under ZeRO-3, by which models would be made in parts
    torch.manual_seed(3)
    own = given.pop("parts", {}), given.get("ours", {}) if size else {}
    parts = {name: x for made in own for name, x in (made() if callable(made) else made).items()}
    section = size and {"size": size, **given.pop("section")}
    sequences = given.pop("batch") * (size or 1) // dist.get_world_size()
    given = {name: x for name, x in given.items() if name not in ("section", *_OF_ORACLE)}
    return make(folder, sequences, section, parts=parts, **given)


def accuracy(prediction):
    counted = prediction.label_ids[:, 1:] != IGNORE
    found = prediction.predictions
    right = (found if found.ndim == 2 else found.argmax(-1))[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float((right & counted).sum() / counted.sum())}


def untimed(history, only=None):
    """All that was logged but times, of each entry; or these figures."""
    found = [{k: v for k, v in entry.items() if not any(x in k for x in OF_TIME)} for entry in history]
    return found if only is None else [x for y in found if (x := {k: v for k, v in y.items() if k in only})]


# kind -> of what "auto" counts: (head, rows of an example)
OBJECTIVES = {"DPO": ("fused", 2), "KTO": ("fused", 1), "Reward": ("score", 2)}


def _checked(trainer, kind, size):
    """The Trainer, of which more is asserted than what it logs."""
    if kind in OBJECTIVES:
        planned = objective_of(trainer)
        assert (planned.head, planned.rows) == OBJECTIVES[kind]
        assert planned.reference == (getattr(trainer, "ref_model", None) is not None)
    rewards = [x for x in getattr(trainer, "reward_funcs", ()) if isinstance(x, torch.nn.Module)]
    assert not size or all(patch_of(unwrapped(x)) for x in rewards)  # they share sequences too
    return trainer


def run(folder, given, size=None, batch=4):
    """(what a case comes to on this rank, what it generated)."""
    kind, at = given.get("kind", "Trainer"), given.get("resume_at")
    if at:
        given = {"save_strategy": "steps", "save_steps": at, **given}
    again = {**given, **given.get("again", {})}
    with rollouts.keyed_noise() if kind in ROLLS_OUT else contextlib.nullcontext([]) as generated:
        trainer = _checked(build(folder, given, size, batch), kind, size)
        output, history = trainer.train(), trainer.state.log_history
        assert output.training_loss == output.metrics["train_loss"] == history[-1]["train_loss"]
        found = {"log": untimed(history, given.get("only"))}
        assert found["log"]
        if at and (size or "only" not in given):  # some figures count from where a process begins
            dist.barrier()
            trainer = build(folder, again, size, batch)
            trainer.train(resume_from_checkpoint=at is True or f"{folder}/checkpoint-{at}")
            if "again" not in given and trainer.args.logging_steps == 1:
                logs = [untimed(x, FIGURES) for x in (history, trainer.state.log_history)]
                assert differences(logs[0], logs[1][: len(logs[0])], 1e-6, KINDS[kind].within) == []
            if trainer.args.load_best_model_at_end:
                trainer.evaluate()
        state = trainer.state
        found["log after"] = untimed(state.log_history, given.get("only"))
        found["best"] = state.best_global_step, state.best_metric
        found["counts"] = {x: getattr(state, x) for x in ("global_step", "epoch", "num_input_tokens_seen", "max_steps")}
        found["samples"] = round(output.metrics["train_samples_per_second"] * output.metrics["train_runtime"])
        found["then"] = given["then"](trainer) if "then" in given else None
    logs = {name: x for name, x in getattr(trainer, "_logs", {}).items() if name != "images"}
    found["tables"] = {name: dict(x) if isinstance(x, dict) else [*x] for name, x in logs.items()}
    return found, generated


def _runs(folder, cases, size, batch):
    return {name: run(f"{folder}/{name}", given, size, batch) for name, given in cases.items()}


def _started(folder, ranks, cases, size, batch, timeout):
    """Of each rank, what each case comes to."""
    kinds = {given.get("kind") for given in cases.values()}
    if kinds & {*OBJECTIVES}:
        save_examples(folder)
    if kinds & {*ROLLS_OUT}:
        rollouts.policy(seed=1).save_pretrained(folder / "reference")
    return on_ranks(ranks, _runs, folder, cases, size, batch, timeout=timeout)


def compare(folder, cases, *shapes, batch=4, alone=None, timeout=400, **defaults):
    """Assert that ranks log what plain ranks do, all of it but times, and that no rank generates what another does.

    Args:
        folder: Where runs write.
        cases: Name -> `case`.
        *shapes: (ranks, those that share a sequence).
        batch: Sequences in a micro-step of all ranks.
        alone: Whether one plain rank has all sequences; by default as its kind says.
        timeout: Of all cases on a shape, in seconds.
        **defaults: Of cases that do not say otherwise.

    Returns:
        What each case comes to on the first plain rank.
    """
    cases, plain = {name: {**defaults, **given} for name, given in cases.items()}, {}
    kinds = {given.get("kind", "Trainer") for given in cases.values()}
    alone = any(KINDS[kind].alone for kind in kinds) if alone is None else alone
    # plain runs are made once of cases that differ in what ours alone is given
    bare = {name: {k: x for k, x in given.items() if k not in _OF_OURS} for name, given in cases.items()}
    same = {name: next(other for other, x in bare.items() if x == given) for name, given in bare.items()}
    bare = {name: bare[name] for name in dict.fromkeys(same.values())}
    for ranks, size in shapes:
        groups = 1 if alone else ranks // size
        if groups not in plain:
            plain[groups] = _started(folder / f"plain {groups}", groups, bare, None, batch, timeout)
        shared = _started(folder / f"{ranks} by {size}", ranks, cases, size, batch, timeout)
        for name, given in cases.items():
            within = KINDS[given.get("kind", "Trainer")].within
            for rank, found in enumerate(shared):
                expected = plain[groups][0 if alone else rank // size][same[name]][0]
                wrong = [
                    each
                    for each in differences(expected, found[name][0], given.get("rel", 1e-5), within)
                    if not each[0].endswith("total_flos") or ranks == size  # several groups pad to other lengths
                ]
                assert not wrong, (name, ranks, size, rank, wrong[:9])
            generated = [found[name][1] for found in shared]
            if any(generated):
                divides = "ours" not in given and given.get("ds3_gather_for_generation", True)
                of_groups = [generated[at : at + size] for at in range(0, ranks, size)]
                rollouts.assert_each_is_generated_once([x[same[name]][1] for x in plain[groups]], of_groups, divides)
    return {name: plain[groups][0][same[name]][0] for name in cases}


def differences(plain, shared, rel=1e-5, within=1e-12, at=""):
    """What is not the same but for rounding: (where, plain, shared)."""
    figure = at.rpartition(" ")[2]
    if isinstance(plain, dict) and isinstance(shared, dict) and plain.keys() == shared.keys():
        pairs = [(f"{at} {name}", x, shared[name]) for name, x in plain.items()]
    elif isinstance(plain, (list, tuple)) and isinstance(shared, (list, tuple)) and len(plain) == len(shared):
        pairs = [(f"{at} {i}", x, other) for i, (x, other) in enumerate(zip(plain, shared, strict=True))]
    elif isinstance(plain, np.ndarray):
        assert plain.shape == shared.shape, at
        gap = np.abs(plain - shared).max(initial=0)
        return [] if gap <= _of(rel, figure) * np.abs(plain).max(initial=0) else [(at, "a difference of", gap)]
    else:
        if isinstance(plain, float) and isinstance(shared, (int, float)) and figure not in EXACT:
            least = max(within, 1e-5) if within > 1e-12 and any(x in figure for x in SUMS) else within
            return [] if shared == pytest.approx(plain, rel=_of(rel, figure), abs=least) else [(at, plain, shared)]
        return [] if plain == shared else [(at, plain, shared)]
    return [each for where, x, other in pairs for each in differences(x, other, rel, within, where)]


def _of(rel, figure):
    return rel.get(figure, 1e-5) if isinstance(rel, dict) else rel


# ---- what is refused


def _refused(folder, module, names):
    """What the Trainer raises for each case of a module's WRONG, by name: (kind, sentence, steps made)."""
    found = {}
    for name in names:
        made, given = [], importlib.import_module(module).WRONG[name][0]

        def attempt(name=name, made=made, given=given):
            made.append(build(f"{folder}/{name}", given() if callable(given) else given, 2))
            made[0].train()

        said = refusal(attempt)
        end_workers()
        found[name] = *said, sum(trainer.state.global_step for trainer in made)
    return found


def assert_refused(folder, module, names=None):
    """Assert that two ranks refuse each case of a module's WRONG by a sentence before the first step.

    WRONG: name -> (a `case`, or on a rank what makes it; words of the sentence).
    """
    wrong = importlib.import_module(module).WRONG
    names = list(names or wrong)
    save_examples(folder)
    for found in on_ranks(2, _refused, folder, module, names):
        assert not_refused(found, {name: wrong[name] for name in names}) == {}


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
