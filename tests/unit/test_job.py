"""What "auto" is where the model and the length are known: what is planned, what is left alone, and what is said."""

import dataclasses
import json
from typing import NamedTuple

import pytest

from ds_seqpar import planning
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.base.hosts import Host, ranks_per_host, this_host
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.deepspeed.config import DeepSpeedJson, Zero
from ds_seqpar.planner.auto import line_of, request_of, resolve_with_plan
from ds_seqpar.planner.machine import DEFAULT, Machine
from ds_seqpar.planner.plan import PlanResult, name_of, plan
from ds_seqpar.planner.request import Job, Model
from tests.unit.commands import golden
from tests.words import missing

Config = SequenceParallelConfig
MODEL = Model(
    hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256,
    parameters=8_030_000_000, layer_parameters=218_000_000,
)  # fmt: skip
JOB = Job(model=MODEL, seq=65536, zero=Zero(stage=3), checkpointing=True)


def _seen(device="NVIDIA H100 80GB HBM3", per_node=8):
    return dataclasses.replace(Machine.guessed(device), per_node=per_node)


class Found(NamedTuple):
    config: Config
    plan: PlanResult


def _planned(world=16, job=JOB, seen=_seen, **settings):
    """A plan is asked for by a machine, where no length asks for it."""
    if "seq_len" not in settings:
        settings = {"machine": "h100-ib", **settings}
    return Found(*resolve_with_plan(Config(**settings), job, world, seen))


# name -> {"why", "world", "job": changes of JOB, "settings", "found": what `seen_of` gives, "says": words of the line}
GOLDEN = golden("job")


def seen_of(found):
    request, best = found.plan.request, found.plan.best
    return {
        "section": json.loads(json.dumps(found.config.section())),
        "asks for a plan": found.config.asks_for_plan,
        "fits": best.memory.peak.total <= _seen().usable,
        "seq": request.seq,
        "documents": len(request.job.documents),
        "sizes that keep a step": list(request.job.sizes(request.world)),
        "sizes that are ranked": sorted({one.config.size for one in found.plan.ranked}),
    }


def test_all_auto_is_what_the_planner_takes():
    found = _planned(world=8)
    its = plan(request_of(Config(), JOB, 65536, 8, _seen())).best.config
    assert found.config == dataclasses.replace(its, machine="h100-ib")
    assert found.config.size == 8
    assert "auto" not in (found.config.ulysses, found.config.schedule)


EVERYTHING = {
    "mlp_tiles": 3, "recompute_attention": False, "size": 8, "ulysses": 8, "schedule": "ring", "head_chunks": 1,
    "loss_tiles": 1, "offload_checkpoints": False, "save_qkv_after_all_to_all": "auto",
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"size": "auto", "ulysses": "auto", "schedule": "auto"},
        {"size": 4},
        {"size": 4, "ulysses": 2, "schedule": "ring", "seq_len": 4096},  # which leaves no choice
        {"rank_order": ["ulysses", "ring"], "seq_len": 4096},
        {**EVERYTHING, "memory": "auto"},
    ],
)
def test_nothing_is_planned_that_nobody_asked_for_or_that_leaves_no_choice(settings):
    assert not Config(**settings).asks_for_plan


@pytest.mark.parametrize(
    ("settings", "job", "said"),
    [
        ({}, {"seq": None}, "say seq_len too"),
        ({}, None, r"machine plans for a model whose numbers are known"),
        ({"seq_len": 4096}, None, r"seq_len.*got 4096.*model"),
        ({"seq_len": 4096}, {"model": None}, r"seq_len.*got 4096.*model"),
        ({"seq_len": 4096}, {"model": None, "seq": None}, r"seq_len.*got 4096.*model"),
        ({"memory": "auto", "machine": "auto"}, None, r"memory plans for a .*numbers are known.*leave memory out"),
        ({"memory": "auto", "machine": "auto"}, {"seq": None}, r"memory plans for a .*say seq_len too.*leave memory"),
    ],
)
def test_what_cannot_be_planned_is_refused(settings, job, said):
    job = job if job is None else dataclasses.replace(JOB, **job)
    with pytest.raises(ConfigError, match=said):
        _planned(job=job, world=8, **settings)


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_planned_and_said_is_that_of_the_golden_file(name):
    case = GOLDEN[name]
    job = {field: tuple(x) if isinstance(x, list) else x for field, x in case["job"].items()}
    found = _planned(case["world"], dataclasses.replace(JOB, **job), **case["settings"])
    assert seen_of(found) == case["found"]
    assert missing(line_of(found.plan), *case["says"]) == []


def test_a_json_says_what_is_trained():
    section = {"stage": 3, "overlap_comm": False}
    content = {"train_batch_size": 8, "gradient_accumulation_steps": "auto", "zero_optimization": section}
    assert Job.of(DeepSpeedJson.read(content)) == Job(
        sequences=8, dtype="float32", zero=Zero(stage=3, overlap_comm=False)
    )
    more = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    assert Job.of(DeepSpeedJson.read(more)) == Job(batch=2, steps=4, dtype="bfloat16")


def test_a_machine_is_supposed_by_the_name_of_the_device():
    for device, name in (("NVIDIA H200", "h200-ib"), ("NVIDIA A100-SXM4-80GB", "a100-ib"), ("", DEFAULT)):
        assert Machine.guessed(device).name == name


def test_a_machine_that_is_named_has_the_ranks_that_launch():
    machine = planning.detected_machine([_host("a")] * 4, planning.named_machine(Config(machine="a100-ib")))
    assert (machine.name, machine.per_node) == ("a100-ib", 4)
    with pytest.raises(ConfigError, match=r"modest.*got 'a100'"):
        planning.named_machine(Config(machine="a100"))


def test_the_memory_that_ranks_see_is_the_machines():
    """A host of 2**34 bytes beside a smaller accelerator than the preset's."""
    hosts = [Host("a", "NVIDIA H100", (0,), 2**34, 2**33)] * 8
    machine = planning.detected_machine(hosts)
    assert (machine.name, machine.memory, machine.host_memory) == ("h100-ib", 2**33, 2**34)


def test_the_line_names_the_choice_and_the_runner_up():
    choice = _planned(world=8).plan
    best, other = choice.ranked[:2]
    line = line_of(choice)
    assert missing(line, "sequence_parallel", "65536 tokens", "8 ranks of h100-ib", f"{best.seconds:.3g} s") == []
    names = name_of(best.config), name_of(other.config)
    assert missing(line, f"{names[1]}, {other.seconds / best.seconds:.2f} times") == []
    assert 0 < line.index(f"{names[0]}, ") < line.index(f"{names[1]}, ")
    assert "\n" not in line


def _host(name, cores=(0, 1), memory=2**34, device=""):
    return Host(name, device, cores, memory)


def test_ranks_a_node_are_those_that_share_a_host():
    assert ranks_per_host([_host("a")] * 4) == 4
    assert ranks_per_host([_host("a"), _host("b"), _host("c")]) == 1
    assert ranks_per_host([_host("a")] * 2 + [_host("b")] * 2) == 2
    for names in ("aab", "abab", "abba"):
        with pytest.raises(ConfigError, match="as many ranks on each host"):
            ranks_per_host([_host(name) for name in names])


def test_what_a_launcher_says_of_a_node_is_not_believed(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as accelerate sets it on CPUs
    assert planning.detected_machine([this_host()] * 4).per_node == 4


def test_processors_are_taken_as_they_are():
    two = planning.detected_machine([_host("a"), _host("a"), _host("b", memory=2**33), _host("b", memory=2**33)])
    assert (two.per_node, two.memory, two.host_memory) == (2, 2**32, 2**33)
    alone = planning.detected_machine([_host("a", cores=tuple(range(8)))])
    assert alone.rates("float32") == tuple(8 * rate for rate in two.rates("float32"))
    apart = planning.detected_machine([_host("a", cores=(n,)) for n in range(4)])  # each bound to a core of its own
    assert apart.matrices == two.matrices
    assert "H100" not in two.about + two.name
    assert planning.detected_machine([_host("a", device="NVIDIA H100")] * 8).name == "h100-ib"
