"""Packs of samples with images, by our own packing: what the plain model computes of each sample alone."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hf_integration import share_sequences
from hf_integration.look.media import media_batch
from hf_integration.look.small import call, small_copy
from tests.dist.ranks import not_refused, refusal
from tests.hf.images import LIMIT, batched, examples
from tests.hf.llama import IGNORE, array
from tests.hf.media_types import model_of
from tests.hf.trainers import FIGURES, case, compare
from tests.launch import on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
slow = pytest.mark.slow
# of samples: the sizes of their images. Some fit a rank, others are shared; some have none
ROWS = ((0,), (1, 0), (), (0,), (), (1,), (0, 0, 1), (), (1,), ())
STEP = 5  # samples


def model_and_samples(name):
    model = small_copy(model_of(name))[0].train()
    return model, examples(model, ROWS)


def section_of(samples):
    """Settings by which the longest sample is shared, and shorter ones need not be."""
    return {"size": 2, "tokens_per_rank": max(x["input_ids"].shape[1] for x in samples) // 2 + 4, "prove": "never"}


def plain(model, samples):
    """(the loss of a step, its gradients): each sample alone, over the labels of all."""
    count = sum(int((sample["labels"][:, 1:] != IGNORE).sum()) for sample in samples)
    total = 0.0
    for sample in samples:
        given = {key: x for key, x in sample.items() if key != "labels"}
        logits = call(model, **given).logits[0, :-1]
        loss = F.cross_entropy(logits, sample["labels"][0, 1:], ignore_index=IGNORE, reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def gradients(model):
    return {key: array(p.grad) for key, p in model.named_parameters() if p.grad is not None}


def gap(found, wanted):
    floor = 0.01 * max(abs(x).max() for x in wanted.values())
    return max(abs(found[key] - x).max() / max(abs(x).max(), floor) for key, x in wanted.items())


def packed(name):
    """(the largest difference of a loss or gradient from the plain ones; how many packs and documents steps have)."""
    model, samples = model_and_samples(name)
    shared, largest, counts = copy.deepcopy(model), 0.0, []
    sp = share_sequences(shared, **section_of(samples))
    for number, packs in enumerate(sp.packs(DataLoader(samples, batch_size=STEP, collate_fn=batched))):
        model.zero_grad()
        shared.zero_grad()
        wanted = plain(model, samples[number * STEP : (number + 1) * STEP])
        losses = []
        for batch in packs:
            losses.append(shared(**batch).loss)
            losses[-1].backward()
        for p in shared.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        loss = sp.mean_loss(sum(losses))
        largest = max(largest, abs(loss - wanted[0]) / wanted[0], gap(gradients(shared), wanted[1]))
        counts.append((len(packs), sum(int((batch["position_ids"].flatten(0, -2)[0] == 0).sum()) for batch in packs)))
    return largest, counts


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen3_vl", 2), *(pytest.param(*case, marks=slow) for case in (("llava", 2), ("qwen3_vl", 4)))],
)
def test_packs_train_as_each_sample_alone(name, ranks):
    for largest, counts in on_ranks(ranks, packed, name):
        assert largest < LIMIT
        assert len(counts) == 2
        assert max(documents for _, documents in counts) > 1


# the Trainer averages the batches of some classes, so that a step of packs is that of one batch
GIVEN = {"max_steps": 4, "gradient_accumulation_steps": 1, "remove_unused_columns": False, "only": FIGURES}
GIVEN |= {"adam_epsilon": 1e-2, "train_sampling_strategy": "sequential"}


def parts(name):
    model, samples = model_and_samples(name)
    return {"model": model, "train_dataset": samples * 4, "eval_dataset": samples[:2], "data_collator": batched}


@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        pytest.param("qwen3_vl", 2, {}, marks=slow),
        pytest.param("qwen3_vl", 4, {}, marks=slow),
        pytest.param("llava", 2, {"gradient_accumulation_steps": 2}, marks=slow),
    ],
)
def test_the_trainer_logs_what_the_plain_one_does(name, ranks, changes, tmp_path):
    given = case(parts=functools.partial(parts, name), section=section_of(model_and_samples(name)[1]), **changes)
    compare(tmp_path, {name: given}, (ranks, 2), batch=8, **GIVEN)


def with_documents(sample, end):
    """A sample whose second document begins behind so many tokens."""
    positions = [torch.arange(end), torch.arange(sample["input_ids"].shape[1] - end)]
    return sample | {"position_ids": torch.cat(positions)[None]}


def on_one(sample):
    return sample | {"pixel_values": sample["pixel_values"] + dist.get_rank()}


def of_text(sample):
    return {key: x for key, x in sample.items() if key in ("input_ids", "labels")}


def with_images(sample):
    return media_batch(small_copy(model_of("qwen3_vl"))[0], ((0,) * 8,))[0]


# what is wrong -> (what is made of the first sample, words that every rank is told)
WRONG = {
    "several documents in a sample": (lambda sample: with_documents(sample, 3), ["one document each", "got one of 2"]),
    "a document that begins inside an image": (lambda sample: with_documents(sample, 8), ["whole images"]),
    "other images on one rank": (on_one, ["samples of a step"]),
    "text without what images have": (of_text, ["the same entries for each token", "mm_token_type_ids"]),
    "more tokens than ranks hold": (with_images, ["tokens_per_rank * size"]),
}


def wrong_samples():
    model, samples = model_and_samples("qwen3_vl")
    sp, found = share_sequences(model, **section_of(samples)), {}
    for name, (change, _) in WRONG.items():
        loader = DataLoader([change(samples[0]), *samples[1:3]], batch_size=3, collate_fn=batched)
        found[name] = *refusal(lambda loader=loader: next(iter(sp.packs(loader)))), 0
    sp.close()
    model = small_copy(model_of("granite_speech"))[0].train()
    sp = share_sequences(model, **section_of(samples))
    found["loss"] = *refusal(lambda: sp.packs(DataLoader(samples, batch_size=3, collate_fn=batched))), 0
    return found


def test_what_cannot_be_packed_is_refused_on_every_rank():
    for found in on_ranks(2, wrong_samples):
        assert not_refused(found, WRONG | {"loss": (None, ["num_items_in_batch", "GraniteSpeech"])}) == {}
