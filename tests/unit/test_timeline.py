"""Time lines: how long things take in them, their lanes, and the trace that is written of them."""

import json

import pytest

from ds_seqpar.analysis.draw import COLORS, NAMES
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.schedules.simulate import Costs, programs_of, simulate
from ds_seqpar.schedules.timeline import TRACKS, Event, Timeline, lanes
from tests.unit.plans import build, shaped

COSTS = Costs(transfer=dict.fromkeys(("q", "kv", "out"), 1.0), product=1.0)
SIMULATED = simulate(programs_of(build("ring", shaped("ring", 4), "forward")), COSTS)
OTHER = Timeline((
    Event(1, "post", 1.0, 1.5, "post"),
    Event(1, "move", 1.0, 4.0, "kv(0):0>1"),
    Event(1, "move", 3.0, 5.0, "kv(3):0>1"),
    Event(1, "wait", 3.0, 4.0, "kv(0):0>1"),
    Event(2, "product", 0.0, 1.0, "q(0)*kv(0)"),
))  # fmt: skip


def test_seconds_are_those_of_the_last_end():
    assert (OTHER.seconds, OTHER.ranks) == (5.0, (1, 2))
    assert Timeline(()).seconds == 0


def test_what_overlaps_gets_lanes_of_its_own():
    spans = [(0, 4), (1, 2), (2, 3), (2, 5), (4, 6), (5, 5)]
    found = lanes(Event(0, "move", start, end, "") for start, end in reversed(spans))
    assert [(lane, e.start, e.end) for lane, e in found] == [
        (0, 0, 4), (1, 1, 2), (1, 2, 3), (2, 2, 5), (0, 4, 6), (1, 5, 5)
    ]  # fmt: skip


def test_a_trace_has_a_process_for_each_rank_and_a_track_for_each_thing_at_a_time(tmp_path):
    file = tmp_path / "trace.json"
    OTHER.save(file, "CP")
    trace = json.loads(file.read_text())
    assert sorted(trace) == ["displayTimeUnit", "traceEvents"]
    names = {
        (e["pid"], e["tid"] if e["name"] == "thread_name" else None): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M"
    }
    processes = [name for (_, tid), name in names.items() if tid is None]
    assert processes == ["CP rank 1", "CP rank 2"]
    assert [names[0, tid] for tid in range(3)] == ["compute", "receive", "receive 2"]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(OTHER.events)
    for span in spans:
        assert names[span["pid"], span["tid"]].split()[0] == TRACKS[span["cat"]]
        assert span["ts"] >= 0 <= span["dur"]
    moved = next(e for e in spans if e["cat"] == "move")
    assert (moved["name"], moved["ts"], moved["dur"]) == ("kv(0):0>1", 1e6, 3e6)
    assert_nested(spans)


def assert_nested(spans):
    """On a track one event is inside another, or after it: Perfetto drops what is neither."""
    for first in spans:
        for other in spans:
            if first is not other and (first["pid"], first["tid"]) == (other["pid"], other["tid"]):
                a, b = sorted([first, other], key=lambda e: (e["ts"], -e["dur"]))
                assert b["ts"] >= a["ts"] + a["dur"] or b["ts"] + b["dur"] <= a["ts"] + a["dur"]


def test_a_trace_needs_a_file_that_can_be_written(tmp_path):
    with pytest.raises(ConfigError, match=r"got .*nowhere"):
        SIMULATED.save(tmp_path / "nowhere" / "trace.json")


def test_all_kinds_have_a_track_and_a_color():
    assert set(TRACKS) == set(COLORS) == set(NAMES)
