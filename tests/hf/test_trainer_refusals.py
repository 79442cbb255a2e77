"""Wrong use of the Trainer is caught before training, on every rank, in a sentence that says what to change."""

import json
import tempfile

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from datasets import Dataset
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    LlamaForCausalLM,
    default_data_collator,
)

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from hf_integration import SequenceParallelTrainer
from tests.dist.ranks import is_one_sentence, refusal
from tests.hf.llama import small
from tests.hf.trainers import documents, end_workers, make, settings, trained
from tests.launch import on_each_of
from tests.launch import on_trainer_ranks as on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
SECTION = {"size": 2}


def unshifted_loss(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """Takes shift_labels and shifts labels itself."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses / num_items_in_batch


def local_mean(logits, labels, vocab_size, shift_labels=None, **kwargs):
    """Takes num_items_in_batch and divides by the rank's own tokens."""
    return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


def half_loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **kwargs):
    """Means another loss than the usual one."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), shift_labels.flatten(), ignore_index=-100, reduction="sum")
    return 0.5 * losses / num_items_in_batch


class OwnForwardForCausalLM(LlamaForCausalLM):
    """Gives its loss neither: a fault that no signature shows."""

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, shift_labels=None, **kwargs):
        return super().forward(input_ids=input_ids, labels=labels, shift_labels=shift_labels, **kwargs)


def own_forward():
    return OwnForwardForCausalLM(small(pad_token_id=0).config)


def with_loss(function):
    model = small(pad_token_id=0)
    model.loss_function = function
    return model


def prompt_tuned():
    import peft

    return peft.get_peft_model(small(pad_token_id=0), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4))


def packed(first=0):
    """Three documents of 8 tokens in each."""
    return [{**example, "position_ids": torch.arange(24) % 8 + first} for example in equal(24)]


def equal(length, count=16):
    return [{"input_ids": torch.full((length,), i + 1), "labels": torch.full((length,), i + 1)} for i in range(count)]


TEXTS = [{"text": "a", "id": 1}] * 8


def builtin():
    """accelerate's context parallelism."""
    return ParallelismConfig(sp_backend="deepspeed", sp_size=1, cp_size=2)


def parts(**given):
    return {"parts": given}


def right_padded():
    return DataCollatorForLanguageModeling(ByT5Tokenizer(extra_ids=0), mlm=False)


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
# what is wrong -> (what `make` is given, each wrong value)
WRONG = {
    "context parallelism": (lambda: {"parallelism_config": builtin()}, "got cp_size 2"),
    "tokens not averaged": (lambda: {"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    "values of the JSON that are not those of arguments": (
        lambda: parts_of_json(OTHER_VALUES),
        *("train_batch_size", "train_micro_batch_size_per_gpu=5", "gradient_accumulation_steps=3", "bf16.enabled"),
        *("gradient_clipping=0.5 for max_grad_norm=1.0", "optimizer.params.lr=0.1", "optimizer.params.eps"),
    ),
    "loss ignores shift_labels": (lambda: {"model": with_loss(unshifted_loss)}, "shift_labels"),
    "loss ignores num_items": (lambda: {"model": with_loss(local_mean)}, "num_items_in_batch"),
    "forward drops num_items, in tiles": (
        lambda: {"model": own_forward(), **parts_of_json({"sequence_parallel": {**SECTION, "loss_tiles": 2}})},
        "num_items_in_batch",
    ),
    "virtual tokens": (lambda: {"model": prompt_tuned()}, "prompt learning"),
    "batches by the first rank, and of all groups": (
        lambda: {"accelerator_config": {"dispatch_batches": True, "split_batches": True}},
        *("dispatch_batches=False", "split_batches=False"),
    ),
    "uneven batches": (lambda: {"accelerator_config": {"even_batches": False}}, "even_batches=True"),
    "a collator that fails": (lambda: parts(train_dataset=equal(24), data_collator=broken), "'weights'"),
    "nobody pads": (lambda: parts(data_collator=default_data_collator), "default_data_collator"),
    "labels are not padded": (
        lambda: parts(
            train_dataset=[{**e, "labels": e["input_ids"]} for e in lists()],
            data_collator=DataCollatorWithPadding(ByT5Tokenizer(extra_ids=0)),
        ),
        "DataCollatorWithPadding",
    ),
    "padding between tokens": (lambda: as_it_is(holes()), "attention_mask"),
    "documents that begin in the middle": (lambda: as_it_is(packed(first=1)), "got 1"),
    "such documents for evaluation": (
        lambda: {**as_it_is(equal(24), eval_dataset=packed(first=1)), "eval_on_start": True}, "got 1"
    ),
    "no labels": (lambda: as_it_is([{"input_ids": torch.ones(24)}] * 8), "labels"),
    "pictures": (lambda: parts(train_dataset=equal(24), data_collator=with_pictures), "got pixel_values"),
    "raw text in columns": (
        lambda: parts(train_dataset=Dataset.from_list(TEXTS), data_collator=right_padded()), "got id, text alone"
    ),
    "raw text in columns for evaluation": (lambda: parts(eval_dataset=Dataset.from_list(TEXTS)), "got id, text alone"),
    "raw text in rows, by a worker": (
        lambda: {**parts(train_dataset=TEXTS, data_collator=right_padded()), "dataloader_num_workers": 1},
        "got id, text alone",
    ),
    "a data set that fails": (lambda: parts(train_dataset=Broken()), "FileNotFoundError: no such file"),
    "labels on padding": (lambda: as_it_is(labeled_padding()), "got 6"),
    "a misspelt section": (lambda: parts_of_json({"sequence_paralel": {"size": 2}}), 'got "sequence_paralel"'),
    "a key given twice": (lambda: {"deepspeed": written_twice()}, '"ulysses" twice'),
    "what DeepSpeed refuses": (
        lambda: parts_of_json({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1.5}}), "1.5"
    ),
    "a loader of sp.loader": (lambda: {"kind": loaders(lambda trainer: trainer.sp.loader)}, "a loader of sp.loader"),
    "several GPUs' JSON": (lambda: parts_of_json({"sequence_parallel_size": 2}), "sequence_parallel_size"),
}  # fmt: skip


def parts_of_json(changes):
    return {"deepspeed_changes": changes}


def as_it_is(train_dataset, **more):
    """Examples that no collator pads."""
    return parts(train_dataset=train_dataset, data_collator=default_data_collator, **more)


def holes():
    return [{**example, "attention_mask": (torch.arange(24) % 9 > 0).long()} for example in equal(24)]


def with_pictures(examples):
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


@on_each_of(2, keep="trainer")
def test_each_is_refused_by_every_rank_before_the_first_step(tmp_path):
    wrong = {}
    for name, (given, *values) in WRONG.items():
        trainers = []

        def run(name=name, given=given, trainers=trainers):
            trainers.append(make(f"{tmp_path}/{name}", 2, SECTION, **{"gradient_accumulation_steps": 1, **given()}))
            trainers[-1].train()

        kind, sentence = refusal(run)
        end_workers()
        steps = sum(trainer.state.global_step for trainer in trainers)
        if not kind or steps or not is_one_sentence(sentence) or missing(sentence, *values):
            wrong[name] = kind, sentence
    assert wrong == {}


class ScaledLoss(SequenceParallelTrainer):
    """Means another loss than the model's."""

    def compute_loss(self, *args, **kwargs):
        loss, output = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
        return (0.5 * loss, output) if kwargs.get("return_outputs") else 0.5 * loss


@on_each_of(2, keep="trainer")
def test_a_models_own_loss_is_looked_at_before_the_first_step(tmp_path):
    """By a compute_loss, which sees whole batches; by a model."""
    _, sentence = refusal(make(f"{tmp_path}/model", 2, SECTION, model=with_loss(half_loss)).train)
    assert is_one_sentence(sentence)
    assert missing(sentence, "num_items_in_batch", "check_loss=False") == []
    args, own = {"max_steps": 1, "max_grad_norm": 0}, {"model": with_loss(half_loss), "parts": {"check_loss": False}}
    usual = trained(make(f"{tmp_path}/usual", 2, SECTION, **args))["grad_norm"]
    for name, given in {"whole": {"kind": ScaledLoss}, "own": own}.items():
        half = trained(make(f"{tmp_path}/{name}", 2, SECTION, **given, **args))["grad_norm"]
        assert half == pytest.approx([0.5 * norm for norm in usual], rel=1e-5)


@on_each_of(4, keep="trainer")
def test_loaders_of_ones_own_are_prepared_by_the_accelerator(tmp_path):
    """Training and evaluation losses are those of the Trainer's own loaders."""
    given = {"max_steps": 1, "eval_strategy": "epoch", "train_sampling_strategy": "sequential"}
    given["parts"] = {"train_dataset": documents(8)}
    own = make(f"{tmp_path}/own", 2, SECTION, kind=loaders(lambda trainer: trainer.accelerator.prepare), **given)
    runs = [trained(trainer).logs for trainer in (own, make(f"{tmp_path}/usual", 2, SECTION, **given))]
    assert len({(*logs["loss"], *logs["eval_loss"]) for logs in runs}) == 1


@on_each_of(2, keep="trainer")
def test_data_sets_are_as_long_on_all_ranks(tmp_path):
    """Groups that have other numbers of examples would make other numbers of steps; ranks with other learning rates
    would step by them in their parts of the optimizer; data that was dealt to ranks before is no group's."""
    section, rank = {"size": 1}, dist.get_rank()
    data = equal(24, 16 - 4 * rank)
    trainer = make(tmp_path, 1, section, stage=3, parts={"train_dataset": data})
    other = make(tmp_path, 1, section, stage=3, learning_rate=1e-3 * (1 + rank))
    dealt = make(tmp_path, 1, SECTION, stage=3, parts={"train_dataset": documents(32)[rank::2]})
    for call, *values in (
        (trainer.train, "rank 0: training examples 16", "rank 1: training examples 12"),
        (lambda: trainer.evaluate(data), "rank 0: 8", "rank 1: 6"),
        (other.train, "rank 0: learning_rate 0.001", "rank 1: learning_rate 0.002"),
        (dealt.train, "whole data set"),
    ):
        assert missing(refusal(call)[1], *values) == []


class OwnOptimizer(SequenceParallelTrainer):
    """With another rate on each rank."""

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1 * (1 + dist.get_rank()))
        return self.optimizer


@on_each_of(2, keep="trainer")
def test_ranks_are_given_the_same_json_and_optimizer(tmp_path):
    """In training, in evaluation and before the doctor; optimizers of their own too."""
    rank = dist.get_rank()
    buckets = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000 + rank}}
    examined = make(tmp_path, 1, {**SECTION, "doctor": True}, deepspeed_changes=buckets)
    said = refusal(examined.train)[1]
    assert "the doctor" in said
    for call in (examined.evaluate, make(tmp_path, 1, SECTION, deepspeed_changes=buckets).train):
        for sentence in (said, refusal(call)[1]):
            assert missing(sentence, "reduce_bucket_size 1000", "rank 1: ", "reduce_bucket_size 1001") == []
    said = refusal(make(tmp_path, 1, SECTION, kind=OwnOptimizer).train)[1]
    assert missing(said, "rank 0: SGD groups [0] lr 0.1", "rank 1: SGD groups [0] lr 0.2") == []


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


@on_each_of(2, keep="trainer")
def test_the_trainer_must_see_all_ranks(tmp_path):
    """On a machine without GPUs it takes every rank for the only one, unless it is told use_cpu."""
    assert missing(refusal(make, tmp_path, 1, {"size": 1}, use_cpu=False)[1], "sees 1 of 2", "use_cpu=True") == []


@on_each_of(2, keep="trainer")
def test_models_may_differ(tmp_path):
    """Trainers of one process: other settings, left to be chosen, and a model that is patched already."""
    first, second = make(tmp_path, 2, SECTION), make(tmp_path, 2, {"size": 2, "ulysses": 1, "layout": "auto"})
    sp = SequenceParallel(SequenceParallelConfig(size=2))
    third = make(tmp_path, 2, SECTION, model=small(pad_token_id=0).patch_attention(sp))
    assert first.sp is not second.sp
    assert second.sp.config.ulysses == 1
    assert third.sp is sp
