"""The Trainer with pictures: its numbers are the plain Trainer's, however ranks share sequences and divide towers."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_integration import SequenceParallelMixin, patch_attention
from hf_integration.inputs import MEDIA, TYPES
from hf_integration.look.in_fp64 import InFP64, fp64
from hf_integration.look.media import media_batch
from hf_integration.look.small import call, small_copy
from tests.dist.ranks import lacking, not_refused, refusal
from tests.dist.ranks import make as make_sp
from tests.hf.llama import IGNORE, with_lora
from tests.hf.media_types import model_of
from tests.hf.trainers import fields, make, split, trained
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
slow = pytest.mark.slow
# patches in one dimension, also in other layers and with states; blocks; one size, split; tiles
NAMES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3", "internvl", "llava", "smolvlm")
# of examples, two of which are a batch: the sizes of their pictures. Of two groups one mostly has text alone
ROWS = ((1, 0), (0,), (), (), (), (), (1,), ())
SHAPES = ((2, 2), (4, 4), (4, 2))  # ranks, of a sequence
FIGURES = ("loss", "grad_norm", "eval_loss")


def examples(model, rows):
    """Return examples of a row each, of other texts and with other pictures."""
    found = []
    for number, pictures in enumerate(rows):
        batch = media_batch(model, rows=(pictures or (0,),))[0]
        is_text = batch["labels"] != IGNORE
        ids = batch["input_ids"].where(is_text, 3) if not pictures else batch["input_ids"].clone()
        ids[0, :3] = number + 3
        labels = batch["labels"] if pictures else ids.clone()
        labels[0, : number % 4 + 3] = IGNORE
        batch |= {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        if not pictures:
            batch = {name: x * 0 if name in TYPES else x for name, x in batch.items() if name not in MEDIA}
        found.append({k: x.roll(number, -1) if k == "pixel_values" else x for k, x in batch.items()})
    return found


def joined(batches):
    """Return examples as a batch: rows are padded on the right, pictures to the most tiles."""
    found = {}
    for name in {name: None for batch in batches for name in batch}:
        given = [batch[name] for batch in batches if name in batch]
        by_token = name in TYPES or name in ("input_ids", "labels", "attention_mask")
        if by_token or given[0].dim() > 4:
            longest = max(x.shape[1] for x in given)
            sides = [[0, 0] * (x.dim() - 2) + [0, longest - x.shape[1]] for x in given]
            given = [
                F.pad(x, side, value=IGNORE if name == "labels" else 0) for x, side in zip(given, sides, strict=True)
            ]
        found[name] = torch.cat(given)
    return found


def projections(model):
    """Return the names of linear layers of the stack and of towers."""
    names = {name.rpartition(".")[2] for name, x in model.named_modules() if isinstance(x, torch.nn.Linear)}
    return sorted(name for name in names - {"lm_head"} if not name.isdigit())


# way -> arguments of the Trainer, and settings of the section
WAYS = {
    "full": {},
    "lora": {},
    "frozen": {},
    "checkpointed": {"gradient_checkpointing": True},
    "tiles": {"section": {"loss_tiles": 2}},
    "undivided": {"section": {"divide_media": False}},
    "resumed": {"save_strategy": "steps", "save_steps": 2},
}
OWN = {"lora": "lora", "frozen": "frozen"}  # ways that train other parameters; the rest is "full"


def run(folder, name, way, batches, stage=None, section=None, exact=False):
    """What a Trainer logs. Stage None: torch's, without DeepSpeed. Exact: in fp64."""
    # an epsilon as large as gradients: else the first steps are made of the signs of what rounding has left
    how = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 5, "remove_unused_columns": False}
    how |= {"adam_epsilon": 1e-2, "train_sampling_strategy": "sequential", "gradient_accumulation_steps": batches}
    how |= WAYS[way]
    how |= {"deepspeed": None} if stage is None else {"deepspeed_changes": split()} if stage == 3 else {}
    of_way = how.pop("section", {})
    section = section and {"ulysses": 1, "prove": "never", **section, **of_way}

    def trainer():
        unset_hf_deepspeed_config()  # of a run under ZeRO-3, by which models would be made in parts
        model = small_copy(model_of(name))[0].train()
        made = examples(model, ROWS * 5)
        for key, p in model.named_parameters():
            p.requires_grad_(way != "frozen" or "vis" not in key)
        if way == "lora":  # adapters at random that outweigh the weights would make much of rounding
            model = with_lora(model, *projections(model), lora_alpha=1)
        if exact:
            fp64(model)
            made = [{key: x.double() if x.is_floating_point() else x for key, x in batch.items()} for batch in made]
        parts = {"train_dataset": made, "eval_dataset": [made[0], made[2]] * 2, "data_collator": joined}
        return make(folder, 2, section, stage, model, parts, **how)

    with InFP64() if exact else contextlib.nullcontext():
        logs = trained(trainer()).logs
    if "save_steps" in how:
        logs = trained(trainer(), resume_from_checkpoint=f"{folder}/checkpoint-{how['save_steps']}").logs
    return {name: torch.tensor(logs[name], dtype=torch.float64) for name in FIGURES}


def runs(folder, name, cases, batches, section=None):
    """What is logged in each case: (way, stage)."""
    return [run(f"{folder}/{at}", name, way, batches, stage, section) for at, (way, stage) in enumerate(cases)]


def plain_runs(folder, name, ways, batches):
    """What the plain Trainer logs in each way: (in fp64, how far it is from that in fp32)."""
    found = {}
    for way in ways:
        truth = run(f"{folder}/{way}", name, way, batches, exact=True)
        found[way] = truth, gaps(run(f"{folder}/{way}", name, way, batches), truth)
    return found


def gaps(found, truth):
    """The largest relative difference of each figure."""
    return {name: float(((found[name] - x) / x).abs().max()) for name, x in truth.items()}


def assert_as_plain(folder, name, cases, shapes, batches):
    """Assert that ranks log what the plain Trainer does in fp64, to 1e-5 beside twice what it is off in fp32.

    Args:
        folder: Where runs write.
        name: A type of model.
        cases: Of `runs`.
        shapes: (ranks, of a sequence) each.
        batches: A step, of all groups.
    """
    ways = {OWN.get(way, "full") for way, _ in cases}
    (plain,) = on_ranks(1, plain_runs, folder / "plain", name, ways, batches, timeout=300)
    for world, size in shapes:
        given = folder / f"{world}-{size}", name, cases, batches * size // world, {"size": size}
        for found in on_ranks(world, runs, *given, timeout=400):
            for (way, stage), logs in zip(cases, found, strict=True):
                truth, own = plain[OWN.get(way, "full")]
                for figure, gap in gaps(logs, truth).items():
                    assert own[figure] < 1e-5, (way, figure)
                    assert gap < 1e-5 + 2 * own[figure], (way, stage, world, size, figure)


@pytest.mark.parametrize(
    ("name", "cases", "shapes", "batches"),
    [
        ("qwen3_vl", [("checkpointed", 2)], [(4, 2)], 4),
        # a step begins with text alone, which uses no tower
        pytest.param("internvl", [("lora", 3)], [(2, 2)], 2, marks=slow),
        *(pytest.param(name, [*itertools.product(("full", "lora"), (2, 3))], SHAPES, 2, marks=slow) for name in NAMES),
        *(
            pytest.param(name, [*itertools.product(WAYS, (2, 3))], [(4, 2)], 4, marks=slow)
            for name in ("qwen3_vl", "gemma3")
        ),
    ],
)
def test_losses_norms_and_evaluation_are_the_plain_trainers(tmp_path, name, cases, shapes, batches):
    """Where two groups share four ranks, one of them often has text alone."""
    assert_as_plain(tmp_path, name, cases, shapes, batches)


def drawn(number):
    """A picture of four colors."""
    picture = Image.new("RGB", (2, 2))
    for at in range(4):
        picture.putpixel((at % 2, at // 2), tuple((37 * number + 59 * at + 83 * color) % 256 for color in range(3)))
    return picture


def processor_of(config):
    """Return a processor of Llava's, with a tokenizer whose words are numbers."""
    side = config.vision_config.image_size
    words = {"<image>" if i == config.image_token_id else f"{i}": i for i in range(config.text_config.vocab_size)}
    by_word = Tokenizer(WordLevel(words, unk_token="1"))
    by_word.pre_tokenizer = WhitespaceSplit()
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"height": side, "width": side}, do_center_crop=False),
        PreTrainedTokenizerFast(
            tokenizer_object=by_word, pad_token="0", eos_token="2", extra_special_tokens={"image_token": "<image>"}
        ),
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
    )


def rows_of_text(count, first):
    """Prompts with no, one or two pictures, and answers, as trl wants them."""
    rows = []
    for number in range(first, first + count):
        images = [drawn(number + at) for at in range((number + 1) % 3)]
        answer = " ".join(str(3 + (number * at + at) % 60) for at in range(5 + number % 7))
        rows.append({"prompt": "3 4 " + "<image> 7 8 " * len(images), "completion": answer, "images": images})
    return Dataset.from_list(rows)


def pairs(rows):
    return rows.rename_column("completion", "chosen").add_column("rejected", ["5 6"] * len(rows))


def trl_run(folder, kind, size, tokens_per_rank=None, **changes):
    """What a Trainer of trl's logs, with pictures."""
    import trl

    plain, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    model = small_copy(model_of("llava"))[0].train()
    section = size and {"size": size, "ulysses": 1, "prove": "never"}
    if tokens_per_rank:
        section = {"size": size, "tokens_per_rank": tokens_per_rank, "prove": "never"}
    how = {"max_steps": 3, "bf16": False, "eval_strategy": "steps", "eval_steps": 3, **changes}
    data = {"train": rows_of_text(24, 0), "eval": rows_of_text(4, 30)}
    trainer = (type("Shared", (SequenceParallelMixin, plain), {}) if size else plain)(
        model=model,
        args=config(str(folder), **fields(2, section, **how)),
        processing_class=processor_of(model.config),
        **({"ref_model": copy.deepcopy(model)} if kind == "DPO" else {}),
        **{f"{name}_dataset": pairs(x) if kind == "DPO" else x for name, x in data.items()},
    )
    trainer.train()
    names = [*FIGURES, "mean_token_accuracy", "entropy", "num_tokens", "eval_entropy"]
    return {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in names}


def test_trls_sft_takes_pictures(tmp_path):
    """With trl's collator around a processor: all that it logs."""
    plain = on_ranks(1, trl_run, tmp_path / "plain", "SFT", None)[0]
    assert len(plain["loss"]) == 3
    for found in on_ranks(2, trl_run, tmp_path / "shared", "SFT", 2):
        for name, values in plain.items():
            assert found[name] == pytest.approx(values, rel=1e-5), name


@slow
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_packs_of_trls_have_pictures(kind, tmp_path):
    """Losses and norms: means over micro-batches are of others in packs."""
    plain = on_ranks(1, trl_run, tmp_path / "plain", kind, None)[0]
    assert len(plain["loss"]) == len(plain["grad_norm"]) == 3
    for found in on_ranks(2, trl_run, tmp_path / "shared", kind, 2, 256):
        for name in ("loss", "grad_norm", "eval_loss"):
            assert found[name] == pytest.approx(plain[name], rel=1e-5), name


def own_loop(way):
    """The largest difference of a gradient from the plain model's, of two steps, in which one of two groups has text
    alone; and what is said where it has films."""
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
    films = {"pixel_values_videos": batches[0]["pixel_values"], "video_grid_thw": batches[0]["image_grid_thw"]}
    given = batches[1] | films if sp.data_rank else batches[0]
    return largest, refusal(wrapped, **given) if way == "FSDP2" else None


@pytest.mark.parametrize("way", ["DDP", pytest.param("FSDP2", marks=pytest.mark.slow)])
def test_loops_of_ones_own_get_the_plain_gradients_where_a_group_has_text_alone(way):
    for largest, told in on_ranks(4, own_loop, way):
        assert largest < 1e-5
        assert told is None or lacking(told, "InputError", "get_image_features", "get_video_features") == []


def read(rows):
    """A collator that reads a column of its own."""
    return joined([row["example"] for row in rows])


def drops(rows):
    """A collator that leaves pictures out on one rank."""
    batch = joined(rows)
    return {name: x for name, x in batch.items() if name not in MEDIA} if dist.get_rank() else batch


def other(rows):
    batch = joined(rows)
    return batch | {"pixel_values": batch["pixel_values"] + dist.get_rank()}


def fails(rows):
    if dist.get_rank():
        raise ValueError("no such file")
    return joined(rows)


# what is wrong -> (the collator, words that every rank is told)
WRONG = {
    "columns that the model does not take": (read, ["example", "remove_unused_columns=False"]),
    "pictures on one rank": (drops, ["the same", "rank 1: ", "pixel_values"]),
    "other pictures on one rank": (other, ["the same", "pixel_values"]),
    "a collator that fails on one rank": (fails, ["making a batch by fails failed", "no such file"]),
}


def wrong_runs(folder):
    found = {}
    for name, (collate, _) in WRONG.items():
        model = small_copy(model_of("llava"))[0].train()
        rows = examples(model, ((0,),) * 8)
        parts = {"train_dataset": [{"example": x} for x in rows] if collate is read else rows, "data_collator": collate}
        trainer = make(f"{folder}/{name}", 2, {"size": 2, "prove": "never"}, model=model, parts=parts)
        found[name] = *refusal(trainer.train), trainer.state.global_step
    return found


@pytest.mark.slow
def test_wrong_uses_of_the_trainer_end_in_a_sentence_on_every_rank(tmp_path):
    for found in on_ranks(2, wrong_runs, tmp_path):
        assert not_refused(found, WRONG) == {}
