"""Wrong use of the Trainer is caught before training, on every rank, in a sentence that says what to change."""

import json
import tempfile

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    default_data_collator,
)

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from hf_integration import SequenceParallelTrainer
from tests.dist.ranks import is_one_sentence, refusal
from tests.hf.llama import small
from tests.hf.losses import half_loss, local_mean, own_forward, prompt_tuned, unshifted_loss, with_loss
from tests.hf.trainers import assert_refused, case, documents, make, settings, trained
from tests.launch import on_trainer_ranks as on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
SECTION = {"size": 2}


def packed(first=0):
    """Three documents of 8 tokens in each."""
    return [{**example, "position_ids": torch.arange(24) % 8 + first} for example in equal(24)]


def equal(length, count=16):
    return [{"input_ids": torch.full((length,), i + 1), "labels": torch.full((length,), i + 1)} for i in range(count)]


TEXTS = [{"text": "a", "id": 1}] * 8
TOKENIZER = ByT5Tokenizer(extra_ids=0)


def builtin():
    """accelerate's context parallelism."""
    return ParallelismConfig(sp_backend="deepspeed", sp_size=1, cp_size=2)


def right_padded():
    return DataCollatorForLanguageModeling(TOKENIZER, mlm=False)


def broken(examples):
    return {"weights": examples[0]["weights"]}


def lists():
    return [{"input_ids": example["input_ids"].tolist()} for example in documents(8)]


def loaders(prepare):
    """A Trainer whose loaders a user makes."""

    def own(trainer, dataset):
        return prepare(trainer)(DataLoader(dataset, batch_size=2, collate_fn=trainer.data_collator))

    class OwnLoaders(SequenceParallelTrainer):
        def get_train_dataloader(self):
            return own(self, self.train_dataset)

        def get_eval_dataloader(self, eval_dataset=None):
            return own(self, self.eval_dataset)

    return OwnLoaders


OTHER_VALUES = {
    "train_micro_batch_size_per_gpu": 5,
    "gradient_accumulation_steps": 3,
    "train_batch_size": 7,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 1e-3}},
}


def own(parts=dict, **changes):
    """A case of one batch a step."""
    return case(parts=parts, batch=2, gradient_accumulation_steps=1, **changes)


def data(train_dataset, data_collator=default_data_collator, **changes):
    return own({"train_dataset": train_dataset, "data_collator": data_collator}, **changes)


def wrong_in_evaluation():
    rows = {"train_dataset": equal(24), "eval_dataset": packed(first=1)}
    return own({**rows, "data_collator": default_data_collator}, eval_on_start=True)


FOREIGN = ["input_ids", "got id, text alone", "tokenize"]
# what is wrong -> (the case, or what makes it; words of the sentence)
WRONG = {
    "context parallelism": (lambda: own(parallelism_config=builtin()), ["ParallelismConfig", "got cp_size 2"]),
    "tokens not averaged": (own(average_tokens_across_devices=False), ["average_tokens_across_devices=False"]),
    "values of the JSON that are not those of arguments": (
        own(deepspeed_changes=OTHER_VALUES),
        [
            *("train_batch_size", "train_micro_batch_size_per_gpu=5", "gradient_accumulation_steps=3", "bf16.enabled"),
            *("gradient_clipping=0.5 for max_grad_norm=1.0", "optimizer.params.lr=0.1", "optimizer.params.eps"),
        ],
    ),
    "loss ignores shift_labels": (
        lambda: own({"model": with_loss(unshifted_loss)}),
        ["shift_labels", "loss_function that"],
    ),
    "loss ignores num_items": (
        lambda: own({"model": with_loss(local_mean)}),
        ["num_items_in_batch", "loss_function that"],
    ),
    "forward drops num_items, in tiles": (
        lambda: own({"model": own_forward()}, section={"loss_tiles": 2}),
        ["num_items_in_batch", "where that is"],
    ),
    "virtual tokens": (lambda: own({"model": prompt_tuned()}), ["prompt learning", "use LoRA"]),
    "batches by the first rank, and of all groups": (
        own(accelerator_config={"dispatch_batches": True, "split_batches": True}),
        ["dispatch_batches=False", "split_batches=False"],
    ),
    "uneven batches": (own(accelerator_config={"even_batches": False}), ["even_batches=True"]),
    "a collator that fails": (lambda: data(equal(24), broken), ["'weights'"]),
    "nobody pads": (own({"data_collator": default_data_collator}), ["default_data_collator", "pad_token"]),
    "labels are not padded": (
        lambda: data([{**e, "labels": e["input_ids"]} for e in lists()], DataCollatorWithPadding(TOKENIZER)),
        ["DataCollatorWithPadding", "tokenizer.pad_token"],
    ),
    "padding between tokens": (lambda: data(holes()), ["attention_mask", "zeros between"]),
    "documents that begin in the middle": (lambda: data(packed(first=1)), ["position_ids", "got 1", "token 0"]),
    "wrong documents for evaluation": (wrong_in_evaluation, ["position_ids", "got 1", "token 0"]),
    "no labels": (lambda: data([{"input_ids": torch.ones(24)}] * 8), ["labels"]),
    "images": (lambda: data(equal(24), with_images), ["text alone", "got pixel_values"]),
    "raw text in columns": (lambda: data(Dataset.from_list(TEXTS), right_padded()), FOREIGN),
    "raw text in columns for evaluation": (lambda: own({"eval_dataset": Dataset.from_list(TEXTS)}), FOREIGN),
    "raw text in rows, by a worker": (
        lambda: data(TEXTS, right_padded(), dataloader_num_workers=1),
        ["in a worker", "ConfigError", "got id, text alone"],
    ),
    "data that fails": (lambda: own({"train_dataset": Broken()}), ["loading data", "FileNotFoundError: no such file"]),
    "labels on padding": (lambda: data(labeled_padding()), ["labels", "got 6", "-100", "attention_mask"]),
    "a misspelt section": (own(deepspeed_changes={"sequence_paralel": {}}), ['got "sequence_paralel", rename']),
    "a key given twice": (lambda: own(deepspeed=written_twice()), ['"ulysses" twice']),
    "what DeepSpeed refuses": (
        own(deepspeed_changes={"zero_optimization": {"stage": 2, "reduce_bucket_size": 1.5}}),
        ["zero_optimization.reduce_bucket_size", "1.5"],
    ),
    "a loader of sp.loader": (
        lambda: own(kind=loaders(lambda trainer: trainer.sp.loader)),
        ["a loader of sp.loader", "return self.accelerator.prepare(DataLoader(...))"],
    ),
    "several GPUs' JSON": (own(deepspeed_changes={"sequence_parallel_size": 2}), ["sequence_parallel_size"]),
}


def holes():
    return [{**example, "attention_mask": (torch.arange(24) % 9 > 0).long()} for example in equal(24)]


def with_images(examples):
    return {**default_data_collator(examples), "pixel_values": torch.zeros(2, 2)}


def labeled_padding():
    """padding="max_length" with labels=input_ids.copy(): 4 tokens of padding, of which the first is predicted from a
    real one."""
    return [{**example, "attention_mask": (torch.arange(24) < 20).long()} for example in equal(24)]


def written_twice():
    whole = json.dumps({**settings(None, 2), "sequence_parallel": {"size": 2, "ulysses": 2, "layout": "auto"}})
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        file.write(whole.replace('"layout": "auto"', '"ulysses": 1'))
    return file.name


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        raise FileNotFoundError("no such file")


def test_each_is_refused_by_every_rank_before_the_first_step(tmp_path):
    assert_refused(tmp_path, __name__)


class ScaledLoss(SequenceParallelTrainer):
    """Means another loss than the model's."""

    def compute_loss(self, *args, **kwargs):
        loss, output = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
        return (0.5 * loss, output) if kwargs.get("return_outputs") else 0.5 * loss


def own_losses(folder):
    """(what is said of a model's own loss, the norms of runs on half of the usual loss, those of the usual one): by a
    compute_loss, which sees whole batches; by a model."""
    _, said = refusal(make(f"{folder}/model", 2, SECTION, model=with_loss(half_loss)).train)
    args, norms = {"max_steps": 1, "max_grad_norm": 0}, []
    for name, given in {
        "whole": {"kind": ScaledLoss},
        "own": {"model": with_loss(half_loss), "parts": {"check_loss": False}},
    }.items():
        norms += trained(make(f"{folder}/{name}", 2, SECTION, **given, **args))["grad_norm"]
    return said, norms, trained(make(f"{folder}/usual", 2, SECTION, **args))["grad_norm"]


def test_a_models_own_loss_is_looked_at_before_the_first_step(tmp_path):
    for sentence, half, whole in on_ranks(2, own_losses, tmp_path):
        assert is_one_sentence(sentence)
        assert "num_items_in_batch" in sentence
        assert "check_loss=False" in sentence
        assert half == pytest.approx([0.5 * norm for norm in whole * 2], rel=1e-5)


def own_loaders(folder):
    """(training losses, evaluation losses) with loaders of a user's that the Trainer's accelerator prepares, and with
    its own."""
    given = {"max_steps": 1, "eval_strategy": "epoch", "train_sampling_strategy": "sequential"}
    given["parts"] = {"train_dataset": documents(8)}
    own = make(f"{folder}/own", 2, SECTION, kind=loaders(lambda trainer: trainer.accelerator.prepare), **given)
    runs = [trained(trainer).logs for trainer in (own, make(f"{folder}/usual", 2, SECTION, **given))]
    return [(logs["loss"], logs["eval_loss"]) for logs in runs]


def test_loaders_of_ones_own_are_prepared_by_the_accelerator(tmp_path):
    for own, usual in on_ranks(4, own_loaders, tmp_path):
        assert own == usual


def unequal(folder):
    """Groups that have other numbers of examples would make other numbers of steps; ranks with other learning rates
    would step by them in their parts of the optimizer; data that was dealt to ranks before is no group's."""
    section, rank = {"size": 1}, dist.get_rank()
    data = equal(24, 16 - 4 * rank)
    trainer = make(folder, 1, section, stage=3, parts={"train_dataset": data})
    other = make(folder, 1, section, stage=3, learning_rate=1e-3 * (1 + rank))
    dealt = make(folder, 1, SECTION, stage=3, parts={"train_dataset": documents(32)[rank::2]})
    calls = trainer.train, lambda: trainer.evaluate(data), other.train, dealt.train
    return [refusal(call)[1] for call in calls]


def test_data_sets_are_as_long_on_all_ranks(tmp_path):
    for said in on_ranks(2, unequal, tmp_path):
        assert missing(said[0], "rank 0: training examples 16", "rank 1: training examples 12") == []
        assert missing(said[1], "evaluation data", "rank 0: 8", "rank 1: 6") == []
        assert missing(said[2], "rank 0: learning_rate 0.001", "rank 1: learning_rate 0.002") == []
        assert missing(said[3], "samples", "whole data set") == []


class OwnOptimizer(SequenceParallelTrainer):
    """With another rate on each rank."""

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1 * (1 + dist.get_rank()))
        return self.optimizer


def unlike(folder):
    """Ranks with other JSONs, in training, in evaluation and before the doctor; with optimizers of their own."""
    rank = dist.get_rank()
    buckets = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000 + rank}}
    examined = make(folder, 1, {**SECTION, "doctor": True}, deepspeed_changes=buckets)
    said = [refusal(examined.train)[1], refusal(examined.evaluate)[1]]
    said.append(refusal(make(folder, 1, SECTION, deepspeed_changes=buckets).train)[1])
    return said, refusal(make(folder, 1, SECTION, kind=OwnOptimizer).train)[1]


def test_ranks_are_given_the_same_json_and_optimizer(tmp_path):
    for said, of_optimizers in on_ranks(2, unlike, tmp_path):
        assert "the doctor" in said[0]
        for sentence in said:
            assert missing(sentence, "reduce_bucket_size 1000", "rank 1: ", "reduce_bucket_size 1001") == []
        assert missing(of_optimizers, "rank 0: SGD groups [0] lr 0.1", "rank 1: SGD groups [0] lr 0.2") == []


class FailsLater(torch.utils.data.Dataset):
    """One rank cannot read its seventh example, which comes up in the middle of the run."""

    def __init__(self):
        self.documents, self.read = documents(32), 0

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, i):
        self.read += 1
        if self.read == 7 and dist.get_rank() == 2:
            raise OSError("disk is gone")
        return self.documents[i]


def fail_later(folder):
    make(folder, 2, SECTION, parts={"train_dataset": FailsLater()}, max_steps=-1, num_train_epochs=1).train()


def test_all_ranks_stop_when_one_cannot_read_its_data(tmp_path):
    for rank, (kind, sentence, _) in enumerate(on_ranks(4, fail_later, tmp_path, check=False, timeout=60)):
        assert kind == ("InputError" if rank == 2 else "DisagreementError"), sentence
        assert "disk is gone" in sentence
        assert is_one_sentence(sentence)


def alone(folder):
    return refusal(make, folder, 1, {"size": 1}, use_cpu=False)[1]


def test_the_trainer_must_see_all_ranks(tmp_path):
    """On a machine without GPUs it takes every rank for the only one, unless it is told use_cpu."""
    for sentence in on_ranks(2, alone, tmp_path):
        assert "sees 1 of 2" in sentence
        assert "use_cpu=True" in sentence


def two_models(folder):
    """Trainers of one process: other settings, left to be chosen, and a model that is patched already."""
    first, second = make(folder, 2, SECTION), make(folder, 2, {"size": 2, "ulysses": 1, "layout": "auto"})
    sp = SequenceParallel(SequenceParallelConfig(size=2))
    third = make(folder, 2, SECTION, model=small(pad_token_id=0).patch_attention(sp))
    return first.sp is not second.sp, second.sp.config.ulysses, third.sp is sp


def test_models_may_differ(tmp_path):
    assert on_ranks(2, two_models, tmp_path) == [(True, 1, True)] * 2
