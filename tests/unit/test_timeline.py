"""Time lines: how long things take in them, their lanes, and the trace that is written of them."""

import json

import pytest

from ds_seqpar.analysis.draw import COLORS, NAMES, draw_timelines
from ds_seqpar.compiler.overlap.simulate import Costs, programs_of, simulate
from ds_seqpar.compiler.overlap.timeline import TRACKS, Event, Timeline, lanes, save_trace, trace_of
from ds_seqpar.errors import ConfigError
from tests.unit.plans import build, shaped

COSTS = Costs(transfer=dict.fromkeys(("q", "kv", "out"), 1.0), product=1.0)
SIMULATED = simulate(programs_of(build("ring", shaped("ring", 4), "forward")), COSTS)
OTHER = Timeline((
    Event(1, "post", 10.0, 10.5, "post"),
    Event(1, "move", 10.0, 13.0, "kv(0):0>1"),
    Event(1, "move", 12.0, 14.0, "kv(3):0>1"),
    Event(1, "wait", 12.0, 13.0, "kv(0):0>1"),
    Event(2, "product", 9.0, 10.0, "q(0)*kv(0)"),
))  # fmt: skip


def test_seconds_are_counted_once():
    assert (OTHER.start, OTHER.seconds, OTHER.ranks) == (9.0, 5.0, (1, 2))
    assert OTHER.busy(1, "move") == 4  # 10-13 and 12-14
    assert OTHER.busy(1, "post", "wait") == 1.5
    assert OTHER.busy(1, "product") == 0
    assert Timeline(()).seconds == 0


def test_ranks_that_do_the_same_at_the_same_times_are_alike():
    def product(rank, start, end, label="q(0)*kv(0)"):
        return Event(rank, "product", start, end, label)

    late, other = product(3, 0.5, 1.5), Event(4, "wait", 0, 1, "")
    short = Event(2, "wait", 0.995, 1, "")
    line = Timeline((product(0, 0, 1), product(2, 0.002, 1, "q(2)*kv(2)"), short, late, other, product(5, 0, 1)))
    assert line.alike() == [(0, 2, 5), (3,), (4,)]
    assert SIMULATED.alike() == [(0, 1, 2, 3)]
    assert Timeline(()).alike() == []


def test_one_time_line_after_another():
    both = SIMULATED.after(OTHER)
    assert both.seconds == OTHER.seconds + SIMULATED.seconds
    assert both.events[: len(OTHER.events)] == OTHER.events
    assert min(event.start for event in both.events[len(OTHER.events) :]) == 14


def test_what_overlaps_gets_lanes_of_its_own():
    spans = [(0, 4), (1, 2), (2, 3), (2, 5), (4, 6), (5, 5)]
    found = lanes(Event(0, "move", start, end, "") for start, end in reversed(spans))
    assert [(lane, e.start, e.end) for lane, e in found] == [
        (0, 0, 4), (1, 1, 2), (1, 2, 3), (2, 2, 5), (0, 4, 6), (1, 5, 5)
    ]  # fmt: skip


def test_a_trace_has_a_process_for_each_rank_and_a_track_for_each_thing_at_a_time(tmp_path):
    file = tmp_path / "trace.json"
    save_trace({"other": OTHER, "simulated": SIMULATED}, file)
    trace = json.loads(file.read_text())
    assert sorted(trace) == ["displayTimeUnit", "traceEvents"]
    names = {
        (e["pid"], e["tid"] if e["name"] == "thread_name" else None): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M"
    }
    processes = [name for (_, tid), name in names.items() if tid is None]
    assert processes == ["other rank 1", "other rank 2", *(f"simulated rank {rank}" for rank in range(4))]
    assert [names[0, tid] for tid in range(3)] == ["compute", "receive", "receive 2"]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(OTHER.events) + len(SIMULATED.events)
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


def test_an_empty_time_line_has_an_empty_trace():
    assert trace_of({"": Timeline(())})["traceEvents"] == []


def test_a_trace_needs_a_file_that_can_be_written(tmp_path):
    with pytest.raises(ConfigError, match=r"got .*nowhere"):
        SIMULATED.save(tmp_path / "nowhere" / "trace.json")


def test_two_time_lines_are_drawn_side_by_side(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    widths, rows = [], {rank: f"rank {rank}" for rank in range(4)}
    for timelines in ({"one": OTHER}, {"one": OTHER, "other": SIMULATED}):
        draw_timelines(timelines, tmp_path / "both.png", rows, second=1.0, unit="s")
        widths.append(image.imread(tmp_path / "both.png").shape[1])
    assert 1.7 <= widths[1] / widths[0] <= 2.3


def test_all_kinds_have_a_track_and_a_color():
    assert set(TRACKS) == set(COLORS) == set(NAMES)
