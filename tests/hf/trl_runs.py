"""Runs of trl's Trainers of preferences, plain and with the mixin before them, and all that they log."""

import peft
import pytest
import torch
from datasets import Dataset, load_from_disk
from transformers import AutoModelForSequenceClassification, ByT5Tokenizer, MixtralConfig, MixtralForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_integration import SequenceParallelMixin
from hf_integration.trainer.job import objective_of
from tests.dist.ranks import refusal
from tests.hf.llama import small
from tests.hf.trainers import fields
from tests.launch import on_trainer_ranks as on_ranks

SEQUENCES = 4  # a group's in a micro-step; a pair counts as one
OF_TIME = ("runtime", "per_second")
STOPS = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 4, "save_total_limit": 1}
STOPS |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_rewards/margins"}
SUMS = ("rewards", "kl", "margin")  # differences of sums over tokens, of a size of 100


def policy(seed=0):
    return small(seed, vocab_size=300, pad_token_id=0)


def reference():
    return {"ref_model": policy(seed=1)}


def experts(seed=0):
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=300, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, router_aux_loss_coef=0.1,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def judge():
    config = policy().config
    config.num_labels = 1
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config)


def lora(task="CAUSAL_LM", **changes):
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": task, **changes}
    return {"peft_config": peft.LoraConfig(**given)}


def examples(kind, count, seed):
    """Texts of many lengths, as the Trainer wants them."""
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


def made(folder, kind, size, parts=dict, drops=(), **changes):
    """A Trainer of trl's, with the mixin where there is a size.

    Args:
        folder: Where its data sets are, and what it writes.
        kind: "DPO", "KTO" or "Reward".
        size: The ranks that share a sequence; None for the plain Trainer.
        parts: What makes its own arguments.
        drops: Columns of its data sets that are left out.
        **changes: Of its configuration.
    """
    import trl

    plain, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    unset_hf_deepspeed_config()  # of a run under ZeRO-3, by which models would be made in parts
    torch.manual_seed(3)  # of adapters too
    # an epsilon as large as gradients: else the first steps are made of the signs of what rounding has left
    how = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 5, "gradient_accumulation_steps": 1, **changes}
    how |= {"bf16": False, "adam_epsilon": 1e-2}
    given = {
        "model": (judge if kind == "Reward" else policy)(),
        "args": config(f"{folder}/{kind}", **fields(SEQUENCES, size and {"size": size}, **how)),
        "processing_class": ByT5Tokenizer(extra_ids=0),
        **{f"{name}_dataset": _read(folder, kind, name).remove_columns(drops) for name in ("train", "eval")},
        **parts(),
    }
    return (type("Shared", (SequenceParallelMixin, plain), {}) if size else plain)(**given)


def _read(folder, kind, name):
    return load_from_disk(f"{folder}/{kind} {name}")


def save_examples(folder):
    for kind in ("DPO", "KTO", "Reward"):
        examples(kind, 48, 5).save_to_disk(folder / f"{kind} train")
        examples(kind, 9, 9).save_to_disk(folder / f"{kind} eval")


def logged(trainer):
    trainer.train()
    return trainer.state.log_history


def logs(folder, cases, size):
    found = {}
    for name, given in cases.items():
        trainer = made(folder, size=size, **given)
        planned = objective_of(trainer)  # of what "auto" counts
        assert (planned.head, planned.rows) == {"KTO": ("fused", 1), "DPO": ("fused", 2)}.get(
            given["kind"], ("score", 2)
        )
        assert planned.reference == (getattr(trainer, "ref_model", None) is not None)
        found[name] = logged(trainer)
    return found


def stopped(folder, cases, size):
    """What is logged by runs that stop and go on, with what they predict then."""
    found = {}
    for name, given in cases.items():
        trainer = made(folder, size=size, **{**STOPS, **given})
        trainer.train()
        best = trainer.state.best_global_step, trainer.state.best_metric
        log, trainer = trainer.state.log_history, made(folder, size=size, **{**STOPS, **given, "max_steps": 6})
        trainer.train(resume_from_checkpoint=True)
        predicted = trainer.predict(trainer.eval_dataset)
        scores = [] if predicted.predictions is None else torch.as_tensor(predicted.predictions).flatten().tolist()
        last = {"step": 6, "best": best[1], **{f"score {i}": x for i, x in enumerate(scores)}, **predicted.metrics}
        found[name] = [*log, *trainer.state.log_history, {**last, "best step": best[0]}]
    return found


def refused(folder, cases):
    """(kind, sentence, steps made) of what each Trainer raises, by name."""
    found, run = {}, []
    for name, given in cases.items():
        run.clear()
        said = refusal(lambda given=given: logged(run.append(made(folder, size=2, **given)) or run[0]))
        found[name] = *said, sum(trainer.state.global_step for trainer in run)
    return found


def compare(folder, cases, groups=1, size=2, run=logs):
    """Assert that groups of `size` ranks log what as many ranks of the plain Trainer log: all of it but times."""
    found = {}
    for way, world, shared in (("plain", groups, None), ("shared", groups * size, size)):
        save_examples(folder / way)  # trl keeps beside them what it computes before
        found[way] = on_ranks(world, run, folder / way, cases, shared, timeout=400)
    for shared in found["shared"]:
        assert {name: different(found["plain"][0][name], shared[name]) for name in cases} == {
            name: [] for name in cases
        }


def different(plain, shared):
    """What was logged otherwise, or not at all: (step, name, plain, shared)."""
    found = [] if len(plain) == len(shared) > 2 else [("entries", len(plain), len(shared))]
    for expected, entry in zip(plain, shared, strict=False):
        for name, value in expected.items():
            close = pytest.approx(value, rel=1e-5, abs=1e-5 if any(x in name for x in SUMS) else 1e-6)
            if not name.endswith(OF_TIME) and entry.get(name) != close:
                found.append((expected["step"], name, value, entry.get(name)))
    return found
