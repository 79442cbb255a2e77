"""The Trainer with images: its numbers are the plain Trainer's, however ranks share sequences and divide towers."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_integration import patch_attention
from hf_integration.inputs import MEDIA
from hf_integration.look.in_fp64 import InFP64, fp64
from hf_integration.look.small import call, small_copy
from tests.dist.ranks import lacking, refusal
from tests.dist.ranks import make as make_sp
from tests.hf.images import batched, examples, projections
from tests.hf.llama import with_lora
from tests.hf.media_types import model_of
from tests.hf.processors import PROCESSORS, drawn
from tests.hf.trainers import assert_refused, case, compare, run, split
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
slow = pytest.mark.slow
# patches in one dimension, also in other layers and with states; blocks; one size, split; tiles
NAMES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3", "internvl", "llava", "smolvlm")
# of examples, two of which are a batch: the sizes of their images. Of two groups one mostly has text alone
ROWS = ((1, 0), (0,), (), (), (), (), (1,), ())
SHAPES = ((2, 2), (4, 4), (4, 2))  # ranks, of a sequence
FIGURES = ("loss", "grad_norm", "eval_loss")
# way -> what changes a case
WAYS = {
    "full": {},
    "lora": {},
    "frozen": {},
    "checkpointed": {"gradient_checkpointing": True},
    "tiles": {"section": {"loss_tiles": 2}},
    "undivided": {"section": {"divide_media": False}},
    "resumed": {"resume_at": 2},
}
OWN = {"lora": "lora", "frozen": "frozen"}  # ways that train other parameters; the rest is "full"


def parts(name, way, exact):
    """A Trainer's own arguments. Exact: in fp64."""
    model = small_copy(model_of(name))[0].train()
    made = examples(model, ROWS * 5)
    for key, p in model.named_parameters():
        p.requires_grad_(way != "frozen" or "vis" not in key)
    if way == "lora":  # adapters at random that outweigh the weights would make much of rounding
        model = with_lora(model, *projections(model), lora_alpha=1)
    if exact:
        fp64(model)
        made = [{key: x.double() if x.is_floating_point() else x for key, x in batch.items()} for batch in made]
    return {"model": model, "train_dataset": made, "eval_dataset": [made[0], made[2]] * 2, "data_collator": batched}


def imaged(name, way, batches, stage=None, exact=False):
    """A case. Stage None: torch's optimizer, without DeepSpeed."""
    # an epsilon as large as gradients: else the first steps are made of the signs of what rounding has left
    how = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "remove_unused_columns": False}
    how |= {"adam_epsilon": 1e-2, "train_sampling_strategy": "sequential", "gradient_accumulation_steps": batches}
    how |= {"deepspeed": None} if stage is None else {"deepspeed_changes": split()} if stage == 3 else {}
    section = {"ulysses": 1, "prove": "never", **WAYS[way].get("section", {})}
    of_way = {**WAYS[way], "section": section, "only": FIGURES}
    return case(parts=functools.partial(parts, name, way, exact), stage=stage, **how, **of_way)


def logged(folder, given, size=None):
    """What a Trainer logs of two sequences a micro-step and group, by figure; also after it has gone on."""
    log = run(folder, given, size, 2 * dist.get_world_size() // (size or 1))[0]["log after"]
    return {name: torch.tensor([x[name] for x in log if name in x], dtype=torch.float64) for name in FIGURES}


def runs(folder, cases, size):
    return [logged(f"{folder}/{at}", given, size) for at, given in enumerate(cases)]


def plain_runs(folder, name, ways, batches):
    """What the plain Trainer logs in each way: (in fp64, how far it is from that in fp32)."""
    found = {}
    for way in ways:
        with InFP64():
            truth = logged(f"{folder}/{way}", imaged(name, way, batches, exact=True))
        found[way] = truth, gaps(logged(f"{folder}/{way}", imaged(name, way, batches)), truth)
    return found


def gaps(found, truth):
    """The largest relative difference of each figure."""
    return {name: float(((found[name] - x) / x).abs().max()) for name, x in truth.items()}


@pytest.mark.parametrize(
    ("name", "cases", "shapes", "batches"),
    [
        # a step begins with text alone, which uses no tower
        ("internvl", [("lora", 3)], [(2, 2)], 2),
        pytest.param("qwen3_vl", [("checkpointed", 2)], [(4, 2)], 4, marks=slow),
        *(pytest.param(name, [*itertools.product(("full", "lora"), (2, 3))], SHAPES, 2, marks=slow) for name in NAMES),
        *(
            pytest.param(name, [*itertools.product(WAYS, (2, 3))], [(4, 2)], 4, marks=slow)
            for name in ("qwen3_vl", "gemma3")
        ),
    ],
)
def test_losses_norms_and_evaluation_are_the_plain_trainers(tmp_path, name, cases, shapes, batches):
    """To 1e-5 of the plain Trainer's in fp64, beside twice what it is off in fp32. Where two groups share four ranks,
    one of them often has text alone."""
    ways = {OWN.get(way, "full") for way, _ in cases}
    (plain,) = on_ranks(1, plain_runs, tmp_path / "plain", name, ways, batches, timeout=300)
    for world, size in shapes:
        given = [imaged(name, way, batches * size // world, stage) for way, stage in cases]
        for found in on_ranks(world, runs, tmp_path / f"{world}-{size}", given, size, timeout=400):
            for (way, stage), logs in zip(cases, found, strict=True):
                truth, own = plain[OWN.get(way, "full")]
                for figure, gap in gaps(logs, truth).items():
                    assert own[figure] < 1e-5, (way, figure)
                    assert gap < 1e-5 + 2 * own[figure], (way, stage, world, size, figure)


def rows_of_text(kind, count, first):
    """Prompts with no, one or two images, and answers, as trl wants them."""
    rows = []
    for number in range(first, first + count):
        images = [drawn(number + at) for at in range((number + 1) % 3)]
        answer = " ".join(str(3 + (number * at + at) % 60) for at in range(5 + number % 7))
        answers = {"completion": answer} if kind == "SFT" else {"chosen": answer, "rejected": "5 6"}
        rows.append({"prompt": "3 4 " + "<image> 7 8 " * len(images), **answers, "images": images})
    return Dataset.from_list(rows)


def parts_of_trls(kind):
    model = small_copy(model_of("llava"))[0].train()
    own = {"model": model, "processing_class": PROCESSORS["llava"](model.config)}
    own |= {"ref_model": copy.deepcopy(model)} if kind == "DPO" else {}
    return own | {"train_dataset": rows_of_text(kind, 24, 0), "eval_dataset": rows_of_text(kind, 4, 30)}


def of_trls(kind, **changes):
    how = {"max_steps": 3, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    return case(kind, functools.partial(parts_of_trls, kind), batch=2, **how, **changes)


@slow
def test_trls_sft_takes_images(tmp_path):
    """With trl's collator around a processor: all that it logs."""
    compare(tmp_path, {"SFT": of_trls("SFT", section={"ulysses": 1, "prove": "never"})}, (2, 2))


@slow
def test_packs_of_trls_have_images(tmp_path):
    """Losses and norms: means over micro-batches are of others in packs."""
    packed = {"section": {"tokens_per_rank": 256, "prove": "never"}, "only": FIGURES}
    compare(tmp_path, {kind: of_trls(kind, **packed) for kind in ("SFT", "DPO")}, (2, 2))


def own_loop(way):
    """The largest difference of a gradient from the plain model's, of two steps, in which one of two groups has text
    alone; and what is said where it has videos."""
    sp = make_sp(size=2, ulysses=1, prove="never")
    plain = small_copy(model_of("qwen2_5_vl"))[0].train()
    batches, model = examples(plain, ROWS)[1:3], patch_attention(copy.deepcopy(plain), sp)
    for batch in batches:
        (call(plain, **batch).loss / len(batches)).backward()
    if way == "DDP":
        wrapped = DistributedDataParallel(model)
    else:
        parts = [*model.model.visual.blocks, model.model.visual, *model.model.language_model.layers]
        for part in parts:
            fully_shard(part)
        wrapped = fully_shard(model)
    largest = 0.0
    for _ in range(2):
        model.zero_grad()
        wrapped(**batches[sp.data_rank], use_cache=False).loss.backward()
        for name, p in plain.named_parameters():
            found = model.get_parameter(name).grad
            found = found.full_tensor() if isinstance(found, DTensor) else found
            if p.grad is not None and p.grad.abs().max() > 1e-4:
                largest = max(largest, float((found - p.grad).abs().max() / p.grad.abs().max()))
    videos = {"pixel_values_videos": batches[0]["pixel_values"], "video_grid_thw": batches[0]["image_grid_thw"]}
    given = batches[1] | videos if sp.data_rank else batches[0]
    return largest, refusal(wrapped, **given) if way == "FSDP2" else None


@pytest.mark.parametrize("way", ["DDP", pytest.param("FSDP2", marks=pytest.mark.slow)])
def test_loops_of_ones_own_get_the_plain_gradients_where_a_group_has_text_alone(way):
    for largest, told in on_ranks(4, own_loop, way):
        assert largest < 1e-5
        assert told is None or lacking(told, "InputError", "get_image_features", "get_video_features") == []


def read(rows):
    """A collator that reads a column of its own."""
    return batched([row["example"] for row in rows])


def drops(rows):
    """A collator that leaves images out on one rank."""
    batch = batched(rows)
    return {name: x for name, x in batch.items() if name not in MEDIA} if dist.get_rank() else batch


def other(rows):
    batch = batched(rows)
    return batch | {"pixel_values": batch["pixel_values"] + dist.get_rank()}


def fails(rows):
    if dist.get_rank():
        raise ValueError("no such file")
    return batched(rows)


def collated(collate):
    model = small_copy(model_of("llava"))[0].train()
    rows = examples(model, ((0,),) * 8)
    data = [{"example": x} for x in rows] if collate is read else rows
    parts = {"model": model, "train_dataset": data, "data_collator": collate}
    return case(parts=parts, batch=2, section={"prove": "never"})


# what is wrong -> (what makes the case, words that every rank is told)
WRONG = {
    "columns that the model does not take": (lambda: collated(read), ["example", "remove_unused_columns=False"]),
    "images on one rank": (lambda: collated(drops), ["the same", "rank 1: ", "pixel_values"]),
    "other images on one rank": (lambda: collated(other), ["the same", "pixel_values"]),
    "a collator that fails on one rank": (
        lambda: collated(fails),
        ["making a batch by fails failed", "no such file"],
    ),
}


@pytest.mark.slow
def test_wrong_uses_of_the_trainer_end_in_a_sentence_on_every_rank(tmp_path):
    assert_refused(tmp_path, __name__)
