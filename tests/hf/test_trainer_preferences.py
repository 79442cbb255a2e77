"""trl's DPOTrainer with the mixin before it logs what it logs alone."""

import os
from pathlib import Path

import peft
import pytest
import torch
from datasets import Dataset, load_from_disk
from transformers import ByT5Tokenizer

from hf_integration import SequenceParallelMixin
from hf_integration.trainer.job import objective_of
from tests.hf.llama import small
from tests.hf.trainers import fields
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
PAIRS = 4  # a micro-step's, of all ranks together
OF_BOTH = (
    *("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen"),
    *("logps/rejected", "logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy", "num_tokens"),
)
FIGURES = ("grad_norm", *OF_BOTH, *(f"eval_{name}" for name in OF_BOTH))
# what the rewards are compared with -> arguments of the trainer and of its configuration
REFERENCES = {
    "adapters switched off": lambda: (
        {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")},
        {"learning_rate": 3e-2},
    ),
    "a model": lambda: ({"ref_model": model(seed=1)}, {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.2]}),
    "computed before": lambda: ({"ref_model": model(seed=1)}, {"precompute_ref_log_probs": True}),
    "a model, in parts": lambda: ({"ref_model": model(seed=1)}, {"stage": 3, "loss_type": ["ipo"]}),
}


def model(seed=0):
    return small(seed, vocab_size=300, pad_token_id=0)


def pairs(count, seed):
    """Texts of many lengths."""
    draw = torch.Generator().manual_seed(seed)

    def text(least, most):
        length = int(torch.randint(least, most, (), generator=draw))
        return "".join(chr(97 + x) for x in torch.randint(0, 26, (length,), generator=draw).tolist())

    columns = {"prompt": (1, 12), "chosen": (1, 30), "rejected": (1, 20)}
    return Dataset.from_list([{name: text(*ends) for name, ends in columns.items()} for _ in range(count)])


def figures(folder, name, size):
    from trl import DPOConfig, DPOTrainer

    class Shared(SequenceParallelMixin, DPOTrainer):
        pass

    torch.manual_seed(3)  # of adapters too
    own, changes, data = *REFERENCES[name](), Path(folder).parent
    of_group = PAIRS * (size or 1) // int(os.environ["WORLD_SIZE"])
    how = {"max_steps": 1, "bf16": False, "eval_strategy": "steps", "eval_steps": 1, **changes}
    given = fields(of_group, size and {"size": size}, **how)
    trainer = (Shared if size else DPOTrainer)(
        model=model(), args=DPOConfig(str(folder), **given), processing_class=ByT5Tokenizer(extra_ids=0),
        train_dataset=load_from_disk(data / "train"), eval_dataset=load_from_disk(data / "eval"), **own,
    )  # fmt: skip
    planned = objective_of(trainer)  # of what "auto" counts
    assert (planned.rows, planned.head, planned.reference) == (2, "fused", trainer.ref_model is not None)
    trainer.train()
    return {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in FIGURES}


def runs(folder, names, sizes):
    return {(name, size): figures(f"{folder}/{name} {size}", name, size) for name in names for size in sizes}


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (("adapters switched off", "a model"), 2),
        (("computed before",), 2),
        pytest.param(tuple(REFERENCES), 4, marks=pytest.mark.whole),
    ],
)
def test_losses_rewards_and_norms_are_trls(names, ranks, tmp_path):
    for folder in (tmp_path, tmp_path / "plain"):  # beside whose files trl keeps what it computes before
        pairs(24, 5).save_to_disk(folder / "train")
        pairs(8, 9).save_to_disk(folder / "eval")
    plain = on_ranks(1, runs, tmp_path / "plain", names, (None,))[0]
    for found in on_ranks(ranks, runs, tmp_path, names, range(2, ranks + 1, 2), timeout=250):
        for (name, size), logged in found.items():
            for figure, values in plain[name, None].items():
                assert len(values) == 1, (name, figure)
                assert logged[figure] == pytest.approx(values, rel=1e-5, abs=1e-6), (name, size, figure)
