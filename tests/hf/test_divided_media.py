"""Images divided among the ranks of a sequence: each is computed once, and all gradients are the plain model's."""

import copy
import functools

import deepspeed
import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ds_seqpar.base.compat import tree_leaves
from ds_seqpar.base.errors import ConfigError, SeqParError
from hf_integration import share_sequences
from hf_integration.context import ForwardContext, entered
from hf_integration.look.media import media_batch
from hf_integration.look.small import call, small_copy
from hf_integration.media import towers
from hf_integration.media.cuts import GRID, IMAGE, LIST, SAME, TILE, Cut, Images, joined
from tests.dist.ranks import make
from tests.hf import llama
from tests.hf.media_types import model_of
from tests.launch import on_each_of, on_ranks

# of each class of input
FLAT, VIDEO, TILES, EACH = "qwen2_5_vl", "qwen3_vl", "idefics3", "llava"
TOWERS = {FLAT: "visual", VIDEO: "visual", TILES: "vision_model", EACH: "vision_tower"}
SEVERAL, FEW = ((), (0,), (1, 0)), ((1,),)
# patches, images or tiles that ranks without a share compute, of the smallest image: so many of them
OF_IDLE = {
    2: {"few": 32, "frozen": 32},
    4: {FLAT: 16, "video": 2 * 16, TILES: 0, "few": 3 * 32},
}


@functools.cache
def copy_of(model_type):
    """Return a small copy of a type."""
    return small_copy(model_of(model_type))[0].train()


def of_type(model_type, rows=SEVERAL):
    """Return a type, how its images are divided, and a batch."""
    small = copy_of(model_type)
    return model_type, towers.cuts_of(small, media_batch(small)[0]), media_batch(small, rows)[0]


def with_video(config, batch):
    """Return a batch in which two images of one size are the frames of one video."""
    ids = batch["input_ids"].clone()
    ids[ids == config.image_token_id] = config.video_token_id
    videos = batch["image_grid_thw"][:1] * torch.tensor([2, 1, 1])
    of_images = ("pixel_values", "image_grid_thw")
    kept = {name: x for name, x in batch.items() if name not in of_images}
    kept |= {"input_ids": ids, "mm_token_type_ids": 2 * batch["mm_token_type_ids"]}
    return kept | {"pixel_values_videos": batch["pixel_values"], "video_grid_thw": videos}


def outcome(model, batch, tower, own=slice(None), factor=1.0):
    """Return (gradients by name, how many patches, images or tiles passed through the tower)."""
    model.zero_grad()
    seen = []

    def count(module, args, kwargs):
        seen.append(len(args[0] if args else kwargs["pixel_values"]))

    handle = dict(model.named_modules())[next(x for x, _ in model.named_modules() if x.endswith(tower))]
    handle = handle.register_forward_pre_hook(count, with_kwargs=True)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits = call(model, **inputs).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    (factor * losses[:, own].sum() / len(losses)).backward()
    handle.remove()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(seen)


def elements(model, cuts, batch):
    """Return how many elements the features of a batch have that take the places of tokens."""
    total = 0
    for name, cut in cuts.items():
        owner, arguments = towers.owner_of(model, name), {}
        for key in towers._names(owner, name):
            arguments |= {key: batch[key]} if key in batch else {}
        if arguments:
            result = getattr(owner, name)(**arguments)
            total += sum(x.numel() for key, way in cut.ways.items() if way != SAME for x in tree_leaves(result[key]))
    return total


def compare(model, cuts, batch, tower, sp, forward=outcome):
    """Return (the largest difference of a gradient, what passed through towers: plain, and by rank; the elements of
    features, and how many all ranks have received)."""
    expected, plain = forward(model, batch, tower)
    with torch.no_grad():
        total = elements(model, cuts, batch)
    before = sp.comm.received[towers.KIND]
    handles = towers.divide(model, sp, cuts)
    mine = slice(sp.rank, None, sp.size)  # of tokens: the gradient of a rank is of its own, times the number of ranks
    with entered(ForwardContext(mode="whole")):
        got, passed = forward(model, batch, tower, mine, sp.size)
    for handle in handles:
        handle.remove()
    assert got.keys() == expected.keys()
    largest = 0.0
    floor = 3e-2 * max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        mean = sp.sum_over_ranks(got[name]) / sp.size
        largest = max(largest, float((mean - x).abs().max()) / max(float(x.abs().max()), floor))
    counts = [int(x) for x in sp.sum_over_ranks(torch.eye(sp.size)[sp.rank] * passed)]
    return largest, plain, counts, total, int(sp.sum_over_ranks(torch.tensor(sp.comm.received[towers.KIND] - before)))


def cases_agree(cases):
    """On a rank: `compare` in each case."""
    sp, found = make(size=torch.distributed.get_world_size(), ulysses=1), {}
    for case, (model_type, cuts, batch) in cases.items():
        small, tower = copy_of(model_type), TOWERS[model_type]
        for name, p in small.named_parameters():
            p.requires_grad_(case != "frozen" or tower not in name)
        found[case] = compare(small, cuts, batch, tower, sp)
    return found


@functools.cache
def all_cases():
    cases = {name: of_type(name) for name in TOWERS}
    model_type, cuts, batch = of_type(VIDEO, ((), (0, 0)))
    cases["video"] = model_type, cuts, with_video(copy_of(VIDEO).config, batch)
    return cases | dict.fromkeys(("few", "frozen"), of_type(FLAT, FEW))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_the_plain_ones_and_each_image_is_computed_once(world):
    cases = {name: case for name, case in all_cases().items() if world == 2 or name in OF_IDLE[4]}
    for found in on_ranks(world, cases_agree, cases):
        assert found.keys() == cases.keys()
        for name, (gap, plain, counts, total, received) in found.items():
            assert gap < 1e-5, name
            # each rank receives the features of the others once, and once from each the gradients of its own
            assert received == (world - 1) * total * (1 if name == "frozen" else 2) > 0, name
            assert sum(counts) == plain + OF_IDLE[world].get(name, 0), (name, counts)


@pytest.mark.parametrize(
    ("rows", "ranks", "shares"),
    [
        ([[1, 8, 8], [1, 2, 2], [1, 2, 2], [1, 2, 2]], 4, [(0, 0), (0, 1), (1, 1), (1, 4)]),
        ([[1, 4, 4]] * 8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ([[6, 4, 4], [2, 4, 4]], 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
    ],
)
def test_neighbors_are_shared_by_patches_and_videos_by_frames(rows, ranks, shares):
    grid = torch.tensor(rows)
    patches = torch.arange(int(grid.prod(1).sum()))[:, None]
    images = Images({"pixel_values": patches, "grid": grid}, Cut(GRID, "grid", frames=True))
    assert images.shares(ranks) == shares
    parts = [images.part(*share) for share in shares if share[0] < share[1]]
    assert torch.equal(torch.cat([part["pixel_values"] for part in parts]), patches)
    assert all(part["grid"].prod(1).sum() == len(part["pixel_values"]) for part in parts)


def test_rows_of_tiles_get_their_features_back():
    tiles = torch.arange(1.0, 7)[:, None, None, None].expand(6, 1, 2, 2).unflatten(0, (3, 2)).clone()
    tiles[0, 1] = tiles[1] = 0  # padding of a row with one image, and of a row with none
    images = Images({"pixel_values": tiles}, Cut(TILE, drops=True))
    parts = [images.part(at, at + 1)["pixel_values"] for at in range(3)]
    features = [[x.flatten(2)[:, 0]] for x in parts]
    rows = joined(LIST, features, [images.of_elements(at, at + 1) for at in range(3)], images.number)
    assert [row[:, 0].tolist() for row in rows] == [[1], [], [5, 6]]


@pytest.mark.parametrize(
    ("model_type", "by", "frames"),
    [(FLAT, GRID, True), ("minimax_m3_vl", GRID, False), ("minicpm_ocr", GRID, None), (TILES, TILE, None),
     ("llava_onevision", IMAGE, None), ("voxtral", IMAGE, None), ("granite_speech", None, None)],
)  # fmt: skip
def test_a_look_finds_what_can_be_divided(model_type, by, frames):
    _, cuts, _ = of_type(model_type)
    assert next((cut.by for cut in cuts.values()), None) == by
    assert (cuts[towers.VIDEOS].frames if towers.VIDEOS in cuts else None) == frames


def text_beside_images(stage, case):
    """Two groups, one of which has text alone. Return the largest difference of a gradient from the plain mean."""
    sp, (model_type, cuts, images) = make(size=2, ulysses=1), case
    small = copy_of(model_type)
    text = {"input_ids": images["input_ids"].flip(-1) % 80, "labels": images["input_ids"].flip(-1) % 80}
    batch = text if sp.data_rank else images
    both = [outcome(small, x, TOWERS[FLAT])[0] for x in (images, text)]
    expected = {name: sum(x[name] for x in both if name in x) / 2 for name in both[0]}
    small.zero_grad()
    towers.divide(small, sp, cuts)
    config = llama.settings({"size": 2}, stage, 1, 1)
    config.pop("sequence_parallel")
    config["optimizer"]["params"]["lr"] = 0.0
    engine, *_ = deepspeed.initialize(model=small, config=config, model_parameters=small.parameters())
    largest = 0.0
    for _ in range(2):  # the first step is traced, the second one gathers ahead
        with entered(ForwardContext(mode="whole")):
            logits = engine(**{name: x for name, x in batch.items() if name != "labels"}).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
        engine.backward(2 * losses[:, sp.rank :: 2].sum() / len(losses))
        for name, p in small.named_parameters():
            got = deepspeed.utils.safe_get_full_grad(p)
            gap = float((got - expected[name]).abs().max()) / float(expected[name].abs().max())
            largest = max(largest, gap if expected[name].abs().max() > 1e-3 else 0.0)
        engine.step()
    return largest


def test_text_beside_images_of_another_group_joins_partitioned_towers():
    assert max(on_ranks(4, text_beside_images, "3", of_type(FLAT, FEW))) < 1e-4


def refusals(case):
    """On a rank: a model whose images cannot be divided, and a tower that fails on one rank, are told to all."""
    sp = make(size=2, ulysses=1, divide_media=True)
    with pytest.raises(ConfigError, match="divide_media"):
        towers.cuts_for(copy_of("granite_speech"), sp)
    model_type, cuts, batch = case
    small = copy_of(model_type)
    towers.divide(small, sp, cuts)

    def fail(module, args):
        raise RuntimeError("no such patches")

    if sp.rank == 1:
        small.get_submodule(f"model.{TOWERS[model_type]}").register_forward_pre_hook(fail)
    with entered(ForwardContext(mode="whole")), pytest.raises(SeqParError, match="no such patches"):
        call(small, **batch)
    return True


def test_what_cannot_be_divided_and_a_tower_that_fails_raise_on_all_ranks():
    assert all(on_ranks(2, refusals, of_type(FLAT)))


def two_steps(model, batch, **options):
    """Return the names of parameters without a gradient after two backward passes in DDP."""
    wrapped = DistributedDataParallel(model, **options)
    for _ in range(2):
        wrapped(**batch).loss.backward()
    return [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.slow
@on_each_of(2)
def test_ddp_must_look_for_parameters_of_towers_that_get_no_gradient():
    """As docs/troubleshooting.md says, for the plain model too."""
    for model_type in (FLAT, EACH):
        batch = media_batch(copy_of(model_type))[0]
        if model_type == FLAT:
            ids = batch["input_ids"] % 80
            batch = {"input_ids": ids, "labels": ids}
        found = []
        for shares in (False, True):
            model = copy.deepcopy(copy_of(model_type))
            if shares:
                share_sequences(model, size=2, prove="never")
            with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
                two_steps(model, batch)
            model.zero_grad()
            found.append(two_steps(model, batch, find_unused_parameters=True))
        assert found[0] == found[1] != []
        assert all(TOWERS[model_type] in name for name in found[0])
