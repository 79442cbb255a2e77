"""A profiler of torch shows each instruction of a walk by the plan's names, and one command joins the ranks' traces."""

import gzip
import json
import re
from unittest import mock

import pytest
import torch

from ds_seqpar.cli.main import main
from tests import oracle
from tests.dist.ranks import leaves, make
from tests.launch import on_warm_ranks as on_ranks

BATCH, SEQ, HEADS, DIM = 3, 32, (4, 4), 8
CASES = {
    "ring": {"ulysses": 1},
    "attention2d": {"ulysses": 1, "schedule": "attention2d", "rows": 2},
    "ulysses": {"ulysses": 2, "head_chunks": 2},
}
KV = BATCH * SEQ // 4 * HEADS[1] * 2 * DIM * 8  # bytes of a block of k and v


def profiled(folder):
    """By case, the bytes that arrived. Leaves a trace of each in the folder."""
    received, whole = {}, oracle.tensors(BATCH, SEQ, HEADS, dim=DIM)
    for name, config in CASES.items():
        sp = make(**config)
        q, k, v = leaves(sp, *whole[:3])
        attend = sp.attention if name == "ring" else lambda *x, sp=sp: sp.checkpoint(sp.attention, *x)
        do = sp.shard(whole[3], 1)
        with torch.profiler.profile() as profile:
            attend(q, k, v).backward(do)
        profile.export_chrome_trace(str(folder / f"{name} {sp.rank}.json"))
        received[name] = sp.comm.received_bytes
        with mock.patch.object(torch.autograd.profiler, "record_function", side_effect=AssertionError("none is on")):
            attend(q, k, v).backward(do)
    return received


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """(folder, bytes that arrived by case, of each rank)"""
    folder = tmp_path_factory.mktemp("traces")
    return folder, on_ranks(4, profiled, folder)


def labels(trace, pid=None):
    events = [e for e in trace["traceEvents"] if e["name"].startswith("ds_seqpar ") and pid in (None, e["pid"])]
    return [e["name"].removeprefix("ds_seqpar ") for e in sorted(events, key=lambda e: (e["ts"], -e["dur"]))]


def test_a_ring_is_shown_as_it_is_planned(traces):
    found = labels(json.loads((traces[0] / "ring 1.json").read_text()))
    forward = found[found.index("ring forward, CP rank 1 of 4") :]
    assert found[0] == "agree on attention"
    assert forward[:15] == [
        "ring forward, CP rank 1 of 4",
        "step 0 enter head chunk 0",
        "step 0 pack kv(1)",
        f"step 0 post kv(1):1>2 {KV} B, kv(0):0>1 {KV} B",
        "step 0 q(1)*kv(1)",
        f"step 0 wait kv(1):1>2 {KV} B, kv(0):0>1 {KV} B",
        f"step 1 post kv(0):1>2 {KV} B, kv(3):0>1 {KV} B",
        "step 1 q(1)*kv(0)",
        f"step 1 wait kv(0):1>2 {KV} B, kv(3):0>1 {KV} B",
        f"step 2 post kv(3):1>2 {KV} B, kv(2):0>1 {KV} B",
        "step 2 q(1)*kv(3)",
        f"step 2 wait kv(3):1>2 {KV} B, kv(2):0>1 {KV} B",
        "step 3 q(1)*kv(2)",
        "step 3 finish out(1)",
        "step 3 leave head chunk 0",
    ]
    assert forward[15].startswith("agree on backward of attention")
    assert forward[16] == "ring backward, CP rank 1 of 4"


@pytest.mark.parametrize("case", CASES)
def test_labels_have_the_bytes_that_arrive(traces, case):
    folder, received = traces
    for rank in range(4):
        found = labels(json.loads((folder / f"{case} {rank}.json").read_text()))
        started = [label for label in found if re.match(r"step \d+ (post|\w+_start) ", label)]
        cp_rank = next(re.search(r"CP rank (\d)", label)[1] for label in found if "CP rank" in label)
        sizes = re.findall(rf"(?:>{cp_rank}|\)) (\d+) B", " ".join(started))
        assert sum(map(int, sizes)) == received[rank][case] > 0


def test_traces_are_joined_in_a_row_for_each_rank(traces, capsys):
    folder = traces[0]
    files = [folder / f"ring {rank}.json" for rank in (2, 0, 3, 1)]
    files[0] = folder / "ring 2.json.gz"
    files[0].write_bytes(gzip.compress((folder / "ring 2.json").read_bytes()))
    assert main(["trace", *map(str, files), "-o", str(folder / "joined.json")]) == 0
    assert "ranks 0-3" in capsys.readouterr().out
    trace = json.loads((folder / "joined.json").read_text())
    rows = [(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [name for _, name in rows] == [f"rank {rank}" for rank in range(4)]
    for rank, (pid, _) in enumerate(rows):
        assert labels(trace, pid) == labels(json.loads((folder / f"ring {rank}.json").read_text()))
    # on one clock: no rank's agreement ends before the last has come
    agreed = [e for e in trace["traceEvents"] if e["name"] == "ds_seqpar agree on attention"]
    assert max(e["ts"] for e in agreed) <= min(e["ts"] + e["dur"] for e in agreed)


def test_joining_needs_one_trace_of_each_rank(traces, capsys):
    folder, ring = traces[0], str(traces[0] / "ring 0.json")
    (folder / "none.json").write_text('{"traceEvents": []}')
    for files, words in {
        (ring, ring): "second one of rank 0",
        (ring, str(folder / "none.json")): "names no rank",
        (str(folder / "missing.json"),): "missing.json",
    }.items():
        assert main(["trace", *files]) == 2
        assert words in capsys.readouterr().err
