"""What "auto" is where the model and the length are known: what is planned, what is left alone, and what is said."""

import dataclasses
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


SHORT = {"schedule": "ring", "layout": "zigzag", "rank_order": "ulysses_intra"}  # a short search


def test_all_auto_is_what_the_planner_takes():
    found = _planned(world=8)
    its = plan(request_of(Config(), JOB, 65536, 8, _seen())).best.config
    assert found.config == dataclasses.replace(its, machine="h100-ib")
    assert found.config.size == 8
    assert "auto" not in (found.config.ulysses, found.config.schedule)


@pytest.mark.parametrize(
    "given",
    [
        {"size": 4, "ulysses": 2, "schedule": "ring"},
        {"rank_order": ["ulysses", "ring"]},
    ],
)
def test_what_leaves_no_choice_is_not_planned(given):
    assert not Config(**given, seq_len=4096).asks_for_plan


@pytest.mark.parametrize("settings", [{}, {"size": "auto", "ulysses": "auto", "schedule": "auto"}, {"size": 4}])
def test_nothing_is_planned_that_nobody_asked_for(settings):
    assert not Config(**settings).asks_for_plan


def test_a_machine_without_a_length_is_refused():
    with pytest.raises(ConfigError, match="say seq_len too"):
        _planned(job=dataclasses.replace(JOB, seq=None))
    with pytest.raises(ConfigError, match=r"machine plans for a model whose numbers are known"):
        _planned(job=None)


def test_what_is_given_stays():
    given = {"size": 8, "ulysses": 2, "layout": "striped", "comm_dtype": "bf16", "kernel": "reference",
             "seq_len": 4096, "head_chunks": 2, "mlp_tiles": "auto", "loss_tiles": 3,
             "recompute_attention": True, "recurrent_layers": "states", "latent_attention": "expanded"}  # fmt: skip
    found = _planned(**given).config
    assert {name: getattr(found, name) for name in given} == given
    assert found.schedule != "auto"
    assert not found.overlap


def test_a_length_said_goes_before_that_of_the_data():
    assert _planned(seq_len=5000, **SHORT).plan.request.seq == 5024  # of which 2 x 16 ranks have equal parts
    assert _planned(**SHORT).plan.request.seq == 65536


def test_a_length_without_a_model_is_refused():
    for job in (None, Job(), dataclasses.replace(JOB, model=None)):
        with pytest.raises(ConfigError, match=r"seq_len.*got 4096.*model"):
            _planned(job=job, seq_len=4096)


def test_a_pack_is_planned_as_its_documents():
    pack = (1024,) * 64
    choice = _planned(job=dataclasses.replace(JOB, documents=pack)).plan
    assert choice.request.job.documents == pack
    said = _planned(job=dataclasses.replace(JOB, documents=pack), seq_len=131072, **SHORT).plan
    assert said.request.job.documents == ()


@pytest.mark.parametrize(
    ("job", "sizes"),
    [
        ({}, (16,)),
        ({"sequences": 4}, (4, 8, 16)),
        ({"sequences": 4, "batch": 2}, (8, 16)),
        ({"sequences": 4, "batch": 2, "steps": 1}, (8,)),
        ({"sequences": 3}, (16,)),
        ({"sequences": 3, "batch": 2}, (16,)),  # which fits nothing, as the batch sizes are told later
    ],
)
def test_sizes_keep_the_sequences_of_a_step(job, sizes):
    job = dataclasses.replace(JOB, **job)
    assert job.sizes(16) == sizes
    found = _planned(job=job, **SHORT)
    assert found.config.size in sizes
    assert all(one.config.size in sizes for one in found.plan.ranked)


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


def test_too_little_memory_is_said_and_the_fastest_taken():
    """A machine may only be supposed: what is predicted not to fit may fit."""
    found = _planned(job=dataclasses.replace(JOB, seq=2**24))
    line = line_of(found.plan)
    needed = found.plan.best.memory.peak.total
    assert needed > _seen().usable
    assert missing(line, f"{needed / 2**30:.1f} GiB", f" {_seen().usable / 2**30:.1f}") == []


SPARED = ("loss_tiles", "mlp_tiles", "head_chunks", "offload_checkpoints", "recompute_attention")


@pytest.mark.parametrize(("seq", "spared"), [(2**15, ()), (2**18, SPARED[:1]), (2**21, (*SPARED[:2], SPARED[3]))])
def test_memory_auto_spares_what_a_length_needs(seq, spared):
    """And nothing else: what spares least and takes no time first."""
    found = _planned(world=8, seq_len=seq, memory="auto", size=8, ulysses=8)
    changed = {name for name in SPARED if getattr(found.config, name) != getattr(Config(), name)}
    assert changed - {"head_chunks"} == set(spared)
    assert found.plan.best.memory.peak.total <= _seen().usable
    assert (found.config.memory, found.config.asks_for_plan) == ("auto", False)
    line = line_of(found.plan)
    assert missing(line, *(spared or ("nothing that spares memory",)), f" of {_seen().usable / 2**30:.1f} GiB") == []


def test_memory_auto_leaves_what_is_said():
    said = {"mlp_tiles": 3, "recompute_attention": False, "size": 8, "ulysses": 8, "schedule": "ring", "head_chunks": 1}
    found = _planned(world=8, seq_len=2**21, memory="auto", **said)
    assert {name: getattr(found.config, name) for name in said} == said
    assert found.config.loss_tiles == "auto"
    _, alone = resolve_with_plan(Config(size=8, memory="auto"), JOB, 8, _seen)  # asks for a plan by itself
    assert alone.request.seq == JOB.seq
    for job, words in ((None, "numbers are known"), (dataclasses.replace(JOB, seq=None), "say seq_len too")):
        with pytest.raises(ConfigError, match=rf"memory plans for a .*{words}.*leave memory out"):
            resolve_with_plan(Config(memory="auto"), job, 8, _seen)
    everything = {
        "loss_tiles": 1,
        "mlp_tiles": 1,
        "offload_checkpoints": False,
        "save_qkv_after_all_to_all": "auto",
        **said,
    }
    assert not Config(**everything, memory="auto").asks_for_plan


def test_where_nothing_fits_memory_auto_spares_all_that_it_may():
    found = _planned(world=8, seq_len=2**24, memory="auto", size=8, ulysses=2)
    its = found.config
    assert (its.loss_tiles, its.mlp_tiles, its.offload_checkpoints, its.recompute_attention) == (
        "auto",
        "auto",
        True,
        True,
    )
    assert its.head_chunks > 1
    assert missing(line_of(found.plan), "attention runs twice", " GiB a rank where the machine has ") == []
    saving = _planned(world=8, seq_len=2**24, memory="auto", size=8, job=dataclasses.replace(JOB, checkpointing=False))
    assert "gradient checkpointing would spare most" in line_of(saving.plan)


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
