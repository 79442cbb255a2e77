"""Engines of `initialize` that are saved and go on, in the same run or a changed one: the losses are those of the run
that was not interrupted, and a save that fails changes nothing."""

import contextlib
import dataclasses
import itertools
import os
import random
import re
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import ds_seqpar
from tests.dist.ranks import is_one_sentence, refusal
from tests.hf.llama import IGNORE, settings, small, update
from tests.launch import on_engine_ranks as on_ranks
from tests.launch import on_ranks as on_new_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "clusters.md"
STOP, END = 3, 8  # an epoch has 5 steps
SEQUENCES = 8  # of a step


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of run."""

    world: int = 2
    size: int = 2
    stage: int = 2
    bf16: bool = False
    order: str = "shuffled"  # by torch's random numbers; "sampler": that of sp.sampler; "given": of training_data
    frozen: bool = False  # whether embeddings are not trained
    adam: bool = True
    sequences: int = SEQUENCES

    def __str__(self):
        return f"({'-'.join(map(str, dataclasses.astuple(self)))})"  # which means something else in a pattern


def examples():
    """Sequences whose labels do not all count."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 64, (5 * SEQUENCES, 24), generator=generator)
    labels = ids.clone()
    for row, first in enumerate(torch.randint(0, 20, (len(ids),), generator=generator).tolist()):
        labels[row, :first] = IGNORE
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def made(case, resumes=False):
    """(engine, its loader). A run that resumes begins with another buffer, and other weights that are not trained."""
    torch.manual_seed(1)
    groups = case.world // case.size
    micro = 1 if groups == 4 else 2
    config = settings({"size": case.size}, str(case.stage), case.sequences // micro // groups, micro)
    config |= {"gradient_clipping": 1.0, "bf16": {"enabled": case.bf16}}
    model = small(initializer_range=0.2)
    model.register_buffer("mark", torch.tensor(1.0 + resumes))
    if case.frozen:
        model.model.embed_tokens.weight.requires_grad_(False).mul_(1.0 + resumes)
    given = {"training_data": examples()} if case.order == "given" else {}
    if case.adam:
        del config["optimizer"]
        matrices = [x for x in model.parameters() if x.dim() > 1 and x.requires_grad]
        parts = [{"params": matrices, "weight_decay": 0.5}, {"params": [x for x in model.parameters() if x.dim() == 1]}]
        optimizer = torch.optim.AdamW(parts, lr=1e-2, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
        given |= {"optimizer": optimizer, "lr_scheduler": schedule}
    engine, _, loader, _ = ds_seqpar.initialize(model=model, config=config, **given)
    torch.manual_seed(2)
    sp = engine.sequence_parallel
    sampler = sp.sampler(examples()) if case.order == "sampler" else None
    return engine, loader or sp.loader(DataLoader(examples(), micro, shuffle=sampler is None, sampler=sampler))


def losses(engine, loader, steps, after=lambda done: None):
    """Of so many optimizer steps."""
    found = []
    while True:
        loader.set_epoch(loader.passes)
        batches = iter(loader)
        while len(found) < steps and (window := list(itertools.islice(batches, engine.gradient_accumulation_steps()))):
            found.append(update(engine, engine.sequence_parallel.shard_batches(window))[0])
            after(len(found))
        if len(found) == steps:
            return found


def whole(folder, case):
    """The losses of a run that is not interrupted, and saves in the middle of its first epoch."""
    engine, loader = made(case)
    random.seed(engine.sequence_parallel.data_rank)
    return losses(engine, loader, END, lambda done: done == STOP and engine.save_checkpoint(folder, loader=loader))


def gone_on(folder, case):
    """The losses of a run from there on, after it has saved what it has loaded. Groups have drawn other numbers of
    Python's before; the ranks of a sequence draw the same ones."""
    engine, loader = made(case, resumes=True)
    torch.manual_seed(77)
    _, state = engine.load_checkpoint(folder, loader=loader)
    assert state is not None
    assert engine.module.mark == 1
    drawn = [None] * case.world
    dist.all_gather_object(drawn, random.random())
    assert len({*zip((rank // case.size for rank in range(case.world)), drawn, strict=True)}) == case.world // case.size
    engine.save_checkpoint(folder / str(case), loader=loader)
    return losses(engine, loader, END - STOP)


SAME = Case()
OTHER = Case(world=1, size=1, stage=3)
SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


def matrix():
    """Kinds of runs, each with those that go on from it: every second of `SHAPES`, each with another stage in turn."""
    firsts = [(2, 2, False), (4, 2, False), (2, 2, True)]
    found = {}
    for stage, (turn, (world, size, bf16)) in itertools.product((0, 1, 2, 3), enumerate(firsts)):
        others = [(number, x) for number, x in enumerate(SHAPES) if (number + stage + turn) % 2]
        stages = [(number + turn + stage) // 2 % 3 + 1 if stage else 0 for number, _ in others]
        first = Case(world, size, stage, bf16)
        found[first] = [(first, Case(*x, to, bf16)) for (_, x), to in zip(others, stages, strict=True)]
    return found


MATRIX = matrix()


def test_a_run_goes_on(tmp_path):
    compare([(SAME, OTHER)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", MATRIX, ids=str)
def test_a_run_goes_on_in_others_and_comes_back(first, tmp_path):
    compare(MATRIX[first], tmp_path, back=True)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["sampler", "given"])
def test_the_order_of_examples_and_what_is_not_trained_go_on(order, tmp_path):
    first = Case(order=order, frozen=True)
    others = [Case(2, 1, 3), Case(4, 2, 2)]
    pairs = [(first, dataclasses.replace(other, order=order, frozen=True)) for other in others]
    compare(pairs, tmp_path, back=True)


def compare(pairs, folder, back=False):
    """Looks at runs from a checkpoint of the first kind: of the same kind, of others, and, if it comes back, of the
    first again after the last of the others has saved what it loaded. In bf16 sums of gradients depend on the ranks."""
    first = pairs[0][0]
    expected = on_ranks(first.world, whole, folder, first)[0][STOP:]
    assert on_ranks(first.world, gone_on, folder, first)[0] == expected
    for _, other in pairs:
        found = on_ranks(other.world, gone_on, folder, other)[0]
        assert found == pytest.approx(expected, rel=3e-3 if first.bf16 else 1e-5), other
    if back:
        assert on_ranks(first.world, gone_on, folder / str(pairs[-1][1]), first)[0] == expected, pairs[-1]


def page_run(folder, script):
    """The optimizer steps that an engine of the page's script has counted when it ends, and its loader's epochs."""
    with contextlib.chdir(folder):
        names = {}
        exec(script, names)
    return names["engine"].global_steps, names["loader"].passes


@pytest.mark.slow
def test_the_script_of_the_page_goes_on_with_other_ranks(tmp_path):
    (script,) = re.findall(r"```python\n(# resumable.py:.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert on_ranks(4, page_run, tmp_path, script.replace("passes < 2", "passes < 1")) == [(4, 1)] * 4
    assert on_ranks(2, page_run, tmp_path, script) == [(8, 2)] * 2


# --- what is refused, and saves that fail


def refused(folder):
    """What is said of runs that cannot go on, and of a save between steps."""
    engine, loader = made(SAME)
    losses(engine, loader, 1)
    engine.save_checkpoint(folder, loader=loader)
    found = {"no loader": refusal(engine.load_checkpoint, folder)}
    found["pattern"] = refusal(engine.save_checkpoint, folder / "run[1]", loader=loader)
    for tag in ("a/b", "latest", ".."):
        found[tag] = refusal(engine.save_checkpoint, folder, tag, loader=loader)
    alone = {"loader": loader} if dist.get_rank() == 0 else {}
    found["loader of one"] = refusal(engine.save_checkpoint, folder, **alone)
    found["states of one"] = refusal(engine.load_checkpoint, folder, load_optimizer_states=dist.get_rank() == 0)
    found["plain loader"] = refusal(engine.save_checkpoint, folder, loader=DataLoader(examples()))
    batch = engine.sequence_parallel.shard_batches(list(itertools.islice(loader, 4)))[0]
    engine.backward(engine(**batch).loss)
    engine.step()
    found["between"] = refusal(engine.save_checkpoint, folder, loader=loader)
    for name, case in OTHERS.items():
        engine, loader = made(case)
        found[name] = refusal(engine.load_checkpoint, folder, loader=loader)
    dist.barrier()
    if dist.get_rank() == 0:
        next((folder / "global_step1").glob("*rank_1_*optim*")).unlink()
    dist.barrier()
    engine, loader = made(SAME)
    found["damaged"] = refusal(engine.load_checkpoint, folder, loader=loader)
    found["nothing"] = engine.load_checkpoint(folder / "none", loader=loader)
    return found


OTHERS = {"stage": Case(stage=0), "bf16": Case(bf16=True), "batch": Case(sequences=16)}
SAID = {
    "pattern": ["run[1]", "rename"],
    "a/b": ["got 'a/b'"],
    "latest": ["got 'latest'"],
    "..": ["got '..'"],
    "plain loader": ["sp.loader", "got DataLoader"],
    "loader of one": ["rank 0: loader True; rank 1: loader False"],
    "states of one": ["rank 0: optimizer states True"],
    "no loader": ["the checkpoint", "none in the run", "loader="],
    "between": ["after 1 of the 4 micro-batches"],
    "stage": ["stage 2, and this run has 0", "between 1, 2 and 3"],
    "bf16": ["in float32, and this run has bfloat16"],
    "batch": ["got 16", "checkpoint of 8"],
    "damaged": ["zero_pp_rank_1_mp_rank_00_optim_states.pt is missing", "(rank 1)"],
}


def test_what_cannot_go_on_is_refused_on_all_ranks(tmp_path):
    for found in on_ranks(2, refused, tmp_path):
        for name, words in SAID.items():
            assert is_one_sentence(found[name][1]), found[name]
            assert missing(found[name][1], *words) == [], found[name]
        assert found["nothing"] == (None, None)


def converted(folder, case):
    """What is said of a checkpoint that needs a conversion; two ranks save it."""
    engine, loader = made(case)
    if case.world == 2:
        losses(engine, loader, 1)
        engine.save_checkpoint(folder, loader=loader)
    return refusal(engine.load_checkpoint, folder, loader=loader)


@pytest.mark.slow
def test_an_optimizer_that_deepspeed_does_not_convert_is_refused_on_all_ranks(tmp_path):
    on_ranks(2, converted, tmp_path, Case(adam=False, stage=1))
    for _, message in on_ranks(4, converted, tmp_path, Case(adam=False, stage=1, world=4)):
        assert missing(message, "Adam's states alone", "as many ranks") == []


def failing(folder, stage):
    """(what was said of a save for which a rank has no room; what is there then; the tag after one with room)."""
    engine, loader = made(Case(stage=stage))
    engine.save_checkpoint(folder, loader=loader)
    losses(engine, loader, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = []
    for failing_rank in (0, 1):
        if dist.get_rank() == failing_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        found.append(refusal(engine.save_checkpoint, folder, loader=loader))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
        found.append((sorted(x.name for x in folder.iterdir() if x.suffix != ".py"), (folder / "latest").read_text()))
    dist.barrier()
    engine.save_checkpoint(folder, loader=loader)
    path, _ = engine.load_checkpoint(folder, loader=loader)
    return found, path


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_without_room_is_said_on_all_and_the_checkpoint_before_stays(stage, tmp_path):
    """RLIMIT_FSIZE in place of a full disk: a file cannot grow beyond it."""
    for found, path in on_ranks(2, failing, tmp_path, stage):
        for said, (names, latest) in zip(found[::2], found[1::2], strict=True):
            if stage or said is found[0]:  # else only rank 0 writes
                assert is_one_sentence(said[1]), said
                assert missing(said[1], "got RuntimeError for", "global_step1", "what was saved before is whole") == []
                assert missing(said[1], "File too large", "MiB free there for some", "MiB of this rank") == []
            assert (names, latest) == (["global_step0", "latest"], "global_step0")
        assert "global_step1" in path


def unable(folder):
    """What is said of a save in which the optimizer of rank 1 cannot say its state; that rank ends by it."""
    engine, loader = made(SAME)
    if dist.get_rank() == 1:
        engine.optimizer.state_dict = lambda: 1 // 0
    said = refusal(engine.save_checkpoint, folder, loader=loader)
    if dist.get_rank() == 1:
        (folder / "said").write_text(" ".join(said))
        os._exit(1)
    return said


@pytest.mark.slow
def test_a_rank_that_fails_before_it_writes_does_not_leave_others_waiting(tmp_path):
    (kind, _), _ = on_new_ranks(2, unable, tmp_path, check=False, timeout=60)
    assert kind == "CommunicationError"
    assert "ZeroDivisionError" in (tmp_path / "said").read_text()
    assert not list(tmp_path.glob("global_step*"))
