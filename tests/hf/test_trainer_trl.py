"""trl's SFTTrainer with the mixin before it logs what it logs alone; what of trl is not supported says so."""

import os

import pytest
from datasets import Dataset
from torch.nn import functional as F
from transformers import ByT5Tokenizer, Trainer

from ds_seqpar.base.errors import ConfigError
from hf_integration import SequenceParallelMixin
from hf_integration.trainer.checks import check_kind
from tests.hf.llama import IGNORE, small
from tests.hf.trainers import documents, fields
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
# a micro-step's, of all ranks together; the plain one is alone, since trl's evaluation loss weighs its ranks alike,
# however many tokens each has
SEQUENCES = 4
FIGURES = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")


def rows(count, seed=5, labels=True):
    """Ragged, as trl wants them; labels of which some do not count."""
    names = ("input_ids", "labels") if labels else ("input_ids",)
    return Dataset.from_list([{name: x[name].tolist() for name in names} for x in documents(count, seed)])


def after_a_prompt(count, seed):
    """Rows that begin with the same tokens, which do not count."""
    prompt = list(range(3, 23))
    found = [[3 + x for x in row["input_ids"]] for row in rows(count, seed)]
    return Dataset.from_list([{"input_ids": prompt + x, "labels": [IGNORE] * len(prompt) + x} for x in found])


def sft(folder, size, parts=None, **changes):
    from trl import SFTConfig, SFTTrainer

    class Shared(SequenceParallelMixin, SFTTrainer):
        pass

    sequences = SEQUENCES * (size or 1) // int(os.environ["WORLD_SIZE"])  # a group's
    how = {"max_steps": 2, "bf16": False, "eval_strategy": "steps", "eval_steps": 1, **changes}
    made = how.pop("made_by", rows)
    own = {"train_dataset": made(how.pop("documents", 48), 5), "eval_dataset": made(8, 9), **(parts or {})}
    return (Shared if size else SFTTrainer)(
        model=small(vocab_size=300, pad_token_id=0),
        args=SFTConfig(str(folder), **fields(sequences, size and {"size": size, "mlp_tiles": 2}, **how)),
        processing_class=ByT5Tokenizer(extra_ids=0),
        **own,
    )


def figures(trainer):
    """All that was logged of the run, training and evaluation, by name."""
    trainer.train()
    names = [*FIGURES, *(f"eval_{name}" for name in FIGURES if name != "grad_norm")]
    return {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in names}


def runs(folder, sizes, cases):
    return {
        (size, name): figures(sft(f"{folder}/{size}{name}", size, **CASES[name])) for name in cases for size in sizes
    }


def by_items(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return losses / (num_items_in_batch or (targets != IGNORE).sum())


OF_TWO_STEPS = {"max_length": 32, "documents": 60, "eval_packing": False, "packing": True}
# TRL#4579: metrics lost because labels became shift_labels; eval_loss 2.97 for 5.95; num_tokens half. TRL PR 6843: with
# its own context parallelism packing is refused, because documents attended across their ends
CASES = {
    "padded": {},
    "bfd": {**OF_TWO_STEPS, "max_length": 48},
    "bfd_split": {**OF_TWO_STEPS, "packing_strategy": "bfd_split"},
    "wrapped": {**OF_TWO_STEPS, "packing_strategy": "wrapped", "eval_packing": True},
    "padding-free": {"padding_free": True, "max_length": None},
    "a loss of one's own": {"parts": {"compute_loss_func": by_items}},
    "a prompt of all rows": {"made_by": after_a_prompt},
    "smoothed": {"label_smoothing_factor": 0.1},
}
FEW = ["padded", "bfd", "wrapped", "a loss of one's own"]


@pytest.mark.parametrize(
    ("cases", "sizes", "ranks"),
    [
        (FEW, (2,), 2),
        pytest.param([name for name in CASES if name not in FEW], (2,), 2, marks=pytest.mark.slow),
        pytest.param(["padded"], (1, 2, 4), 4, marks=pytest.mark.slow),
    ],
)
def test_all_that_sft_logs_is_the_plain_trainers_in_training_and_evaluation(cases, sizes, ranks, tmp_path):
    plain = on_ranks(1, runs, tmp_path / "plain", (None,), cases)[0]
    for found in on_ranks(ranks, runs, tmp_path, sizes, cases, timeout=400):
        for (size, name), logged in found.items():
            for figure, values in plain[None, name].items():
                assert len(values) == 2, figure
                assert logged[figure] == pytest.approx(values, rel=1e-4), (name, size, figure)


def test_what_else_trl_has_is_refused_whatever_its_name():
    from trl import SFTTrainer

    experimental = type("NewTrainer", (Trainer,), {"__module__": "trl.experimental.new.new_trainer"})
    with pytest.raises(ConfigError, match="got a NewTrainer"):
        check_kind(type("Shared", (SequenceParallelMixin, experimental), {}))
    check_kind(type("Shared", (SequenceParallelMixin, SFTTrainer), {}))
