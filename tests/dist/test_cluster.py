"""A cluster in a box, for real: what `benchmarks.cluster` says of bytes, and that it leaves nothing behind."""

import argparse
import dataclasses
import os
import subprocess
import sys

import pytest

from benchmarks import cluster, cluster_balance, cluster_net, cluster_plan, cluster_table, train
from benchmarks.cluster_spec import parse
from ds_seqpar.errors import ConfigError
from tests import launch

needs_network = pytest.mark.skipif(cluster_net.refusal() is not None, reason=str(cluster_net.refusal()))
PROBLEM = cluster_plan.Problem(
    nodes=2, per_node=2, seq=256, heads=8, kv_heads=4, head_dim=32, dtype="fp32", causal=True
)  # fmt: skip


@pytest.fixture(autouse=True)
def _preloaded(monkeypatch):
    """A test worker has one server of ranks, whichever test starts it, and others need more of it."""
    monkeypatch.setattr(cluster, "PRELOAD", launch.PRELOAD)


@pytest.mark.usefixtures("compiled")  # DeepSpeed is among them
@needs_network
@pytest.mark.parametrize(("latency", "names"), [
    (0.0, ("attention2d=2,2", "u2/ring", "deepspeed")), (0.001, ("ring",)),
], ids=["bridge", "late"])  # fmt: skip
def test_bytes_on_links_are_the_plans(latency, names):
    configurations = [parse(name) for name in names]
    args = argparse.Namespace(
        nodes=2, ranks_per_node=2, link="200mbit", latency=latency, configurations=configurations, rounds=1,
        patience=60.0,
    )  # fmt: skip
    rows = cluster.measure(args, PROBLEM)
    assert [row["name"] for row in rows] == [spec.name for spec in configurations]
    for row in rows:
        assert row["error"] < 1e-4
        assert cluster_table.plan_ratio(row) == pytest.approx(1, rel=0.05), row
    assert all(str(os.getpid()) not in path.name for path in cluster_net.FOLDER.glob(f"{cluster_net.PREFIX}-*"))


@needs_network
def test_a_call_whose_products_sleep_as_long_as_links_carry():
    args = argparse.Namespace(
        nodes=2, ranks_per_node=1, link="20mbit", latency=0.0, configurations=[parse("ring")], rounds=1, patience=60.0,
        compute=1.0,
    )  # fmt: skip
    (row,) = cluster_balance.measure(args, dataclasses.replace(PROBLEM, per_node=1))
    assert row["error"] < 1e-4
    assert min(row["seconds"]) >= row["compute"]  # it slept
    assert row["critical_path"] >= row["links"] * 0.95  # which count headers
    with pytest.raises(ConfigError, match=r"sleep.*got deepspeed"):
        args.configurations = [parse("deepspeed")]
        cluster_balance.measure(args, dataclasses.replace(PROBLEM, per_node=1))
    with pytest.raises(ConfigError, match=r"link.*got 2"):
        cluster_balance.measure(args, PROBLEM)


@pytest.mark.usefixtures("compiled")  # DeepSpeed is among them
@needs_network
@pytest.mark.parametrize(
    ("per_node", "ours", "links"),
    [(1, "ring", "1gbit"), pytest.param(2, "u2/ring", "200mbit 1gbit", marks=pytest.mark.whole)],
)
def test_training_steps_over_links(per_node, ours, links):
    """Losses are compared by the benchmark itself, which ends where they differ."""
    words = f"--nodes 2 --ranks-per-node {per_node} --seq 512 --layers 1 --hidden 64 --intermediate 64 --heads 4"
    more = f"--kv-heads 4 --vocab 64 --rounds 1 --steps 1 --link {links} -- {ours} deepspeed"
    args = train.arguments([*words.split(), *more.split()])
    rows = train.measure(args)
    assert [row["name"] for row in rows] == [ours, "deepspeed"]
    for row in rows:
        assert [len(row["seconds"][rate]) for rate in links.split()] == [1] * len(args.link)
        assert max(row["zero"]["out"]) > 0
    assert train.attention(rows[0]) == pytest.approx(rows[0]["plan"], rel=0.1)
    # a checkpoint of DeepSpeed's sends twice in forward what ours sends once
    assert train.attention(rows[1]) == pytest.approx(1.5 * rows[1]["plan"], rel=0.1)
    assert f"| {ours} |" in train.table(rows, args, "1gbit")


@needs_network
def test_what_a_killed_run_left_is_removed():
    code = "import os, time; from benchmarks import cluster_net as n; c = n.Network(2, '1mbit').__enter__();"
    left = subprocess.Popen(
        [sys.executable, "-c", f"{code} print(c.names[0], flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    name = left.stdout.readline().strip()
    assert name not in cluster_net.sweep()  # its owner lives
    left.kill()
    left.wait()
    left.stdout.close()
    assert cluster_net.FOLDER.joinpath(name).exists()
    assert name in cluster_net.sweep()
    assert not cluster_net.FOLDER.joinpath(name).exists()


def test_without_root_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cluster_net.shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["cluster"])
    with pytest.raises(SystemExit) as ended:
        cluster.main()
    assert ended.value.code == 2
    assert "needs root" in capsys.readouterr().err
