"""A cluster in a box, for real: what its benchmarks say of bytes, and that it leaves nothing behind."""

import argparse
import os
import subprocess
import sys

import pytest

from benchmarks.cluster import attention, layers, net, ranks, training
from benchmarks.memory.peers import Bench
from benchmarks.sparse import layer
from tests import launch
from tests.dist.ranks import is_one_sentence

needs_network = pytest.mark.skipif(net.refusal() is not None, reason=str(net.refusal()))


@pytest.fixture(autouse=True)
def _preloaded(monkeypatch):
    """A test worker has one server of ranks, whichever test starts it, and others need more of it."""
    monkeypatch.setattr(ranks, "PRELOAD", launch.PRELOAD)


@pytest.mark.usefixtures("compiled")  # DeepSpeed is among them
@needs_network
def test_bytes_on_links_are_the_plans():
    contenders = ["attention2d=2,2", "deepspeed"]
    words = "--nodes 2 --ranks-per-node 2 --link 200mbit --rounds 1 --seq 256 --heads 8 --kv-heads 4 --head-dim 32 --"
    args = attention.arguments(argparse.ArgumentParser(), [], [*words.split(), *contenders])
    rows = attention.measure(args)
    assert [row["name"] for row in rows] == contenders
    for row in rows:
        assert row["error"] < 1e-4
        assert attention.plan_ratio(row) == pytest.approx(1, rel=0.05), row
    assert all(str(os.getpid()) not in path.name for path in net.FOLDER.glob(f"{net.PREFIX}-*"))


@needs_network
@pytest.mark.slow  # three sets of ranks; bytes of attention are seen above
@pytest.mark.parametrize(("step", "contenders"), [
    ("prefill", ["ring", "attention2d=2,2"]),
    ("continue", ["ring", "ring+rotate_forward=q", "ring+rotate_forward=kv"]),
    ("decode", ["ring", "ring+rotate_forward=kv"]),
])  # fmt: skip
def test_generation_over_links(step, contenders):
    """Results are compared with dense attention by the benchmark itself, which ends where they differ."""
    words = "--nodes 4 --link 200mbit --rounds 1 --seq 128 --kept 512 --heads 8 --kv-heads 4 --head-dim 32"
    args = attention.arguments(argparse.ArgumentParser(), [], [*words.split(), "--step", step, "--", *contenders])
    rows = attention.measure(args)
    assert [row["name"] for row in rows] == contenders
    assert [row.get("cannot") for row in rows] == [None] * len(rows)
    sent = {row["name"]: max(row["out"]) for row in rows}
    if step != "prefill":  # 512 keys and values of 4 heads, against fewer queries with results of 8
        assert sent["ring"] < 0.8 * sent["ring+rotate_forward=kv"]


@needs_network
@pytest.mark.slow  # three sets of ranks
@pytest.mark.parametrize(("kind", "contenders"), [
    ("delta", ["u4+recurrent_layers=heads", "ring+recurrent_layers=states"]),
    ("decay", ["u2/ring+recurrent_layers=heads", "ring+layout=contiguous+recurrent_layers=states"]),
    ("latent", ["ring+latent_attention=latent", "ring+latent_attention=expanded"]),
])  # fmt: skip
def test_layers_over_links(kind, contenders):
    """Results are compared with those of one process by the benchmark itself, which ends where they differ."""
    words = "--nodes 4 --link 200mbit --rounds 1 --seq 1024 --heads 8 --head-dim 16"
    args = layers.arguments([*words.split(), "--layer", kind, "--", *contenders])
    rows = layers.measure(args, layers.reference(args), layers.build)
    assert [row.get("cannot") for row in rows] == [None] * len(rows)
    for row in rows:
        assert max(row["in"]) == pytest.approx(row["counted"], rel=0.1, abs=5e4), row


@needs_network
@pytest.mark.slow
def test_a_layer_that_picks_keys_over_links():
    """Results are compared with those of one process by the benchmark itself. All send the same, `pieces` at once."""
    args = layer.arguments(["--nodes", "4", "--rounds", "1", "--seq", "512", "--picks", "32"])
    rows = layers.measure(args, layer.reference(args), layer.build)
    assert [(row["name"], row.get("cannot")) for row in rows] == [(name, None) for name in layer.WAYS[:3]]
    assert len({row["counted"] for row in rows}) == 1
    for row in rows:
        assert max(row["in"]) == pytest.approx(row["counted"], rel=0.1, abs=5e4), row


@pytest.mark.usefixtures("compiled")  # DeepSpeed is among them
@needs_network
@pytest.mark.slow  # two trainings over links; bytes of attention are seen above
@pytest.mark.parametrize(("per_node", "ours", "links"), [(1, "ring", "1gbit"), (2, "u2/ring", "200mbit 1gbit")])
def test_training_steps_over_links(per_node, ours, links):
    """Losses are compared by the benchmark itself, which ends where they differ."""
    words = f"--nodes 2 --ranks-per-node {per_node} --seq 512 --layers 1 --hidden 64 --intermediate 64 --heads 4"
    more = f"--kv-heads 4 --vocab 64 --rounds 1 --steps 1 --link {links} -- {ours} deepspeed"
    args = training.arguments([*words.split(), *more.split()])
    rows = training.measure(args)
    assert [row["name"] for row in rows] == [ours, "deepspeed"]
    for row in rows:
        assert [len(row["seconds"][rate]) for rate in links.split()] == [1] * len(args.link)
        assert max(row["zero"]["out"]) > 0
    assert training.attention(rows[0]) == pytest.approx(rows[0]["plan"], rel=0.1)
    # a checkpoint of DeepSpeed's sends twice in forward what ours sends once
    assert training.attention(rows[1]) == pytest.approx(1.5 * rows[1]["plan"], rel=0.1)
    assert f"| {ours} |" in training.table(rows, args, "1gbit")


def test_what_is_planned_of_training_steps():
    """The planner chooses u4 here; what cannot run is said in a sentence below the table, as of other benchmarks."""
    names = ["u4", "auto+checkpointing=false", "u2+checkpointing=false", "u2+head_chunks=auto", "u2+foo=1", "u16"]
    args = training.arguments(["--nodes", "1", "--ranks-per-node", "4", "--seq", "512", "--", *names])
    args.nodes, args.ranks_per_node = 4, 1  # nothing is started
    bench = Bench(args)
    u4, auto, u2, *refused = (training.planned(spec, bench, args) for spec in args.contenders)
    assert auto == u4
    assert u2["plan"] > u4["plan"] > 0
    for found, word in zip(refused, ("head_chunks", "'foo'", "divide"), strict=True):
        assert is_one_sentence(found["cannot"])
        assert word in found["cannot"]
    rows = [{"name": name, **found} for name, found in zip(names[3:], refused, strict=True)]
    assert training.table(rows, args, "1gbit").endswith(f"u16: {refused[-1]['cannot']}")


@needs_network
def test_what_a_killed_run_left_is_removed():
    code = "import os, time; from benchmarks.cluster import net as n; c = n.Network(2, '1mbit').__enter__();"
    left = subprocess.Popen(
        [sys.executable, "-c", f"{code} print(c.names[0], flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    name = left.stdout.readline().strip()
    assert name not in net.sweep()  # its owner lives
    left.kill()
    left.wait()
    left.stdout.close()
    assert net.FOLDER.joinpath(name).exists()
    assert name in net.sweep()
    assert not net.FOLDER.joinpath(name).exists()


def test_without_root_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(net.shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["cluster"])
    with pytest.raises(SystemExit) as ended:
        attention.main()
    assert ended.value.code == 2
    assert "needs root" in capsys.readouterr().err
