"""Time lines: how long things take in them, their lanes, and the trace that is written of them."""

import json

import pytest

from ds_seqpar.analysis.draw import COLORS, NAMES, draw_timelines
from ds_seqpar.compiler.overlap.simulate import Costs, programs_of, simulate
from ds_seqpar.compiler.overlap.timeline import TRACKS, Event, Timeline, lanes, save_trace, trace_of
from ds_seqpar.errors import ConfigError
from ds_seqpar.runtime.recording import Barrier, ahead, shifted
from tests.unit.plans import build, shaped

COSTS = Costs(transfer=dict.fromkeys(("q", "kv", "out"), 1.0), product=1.0)
SIMULATED = simulate(programs_of(build("ring", shaped("ring", 4), "forward")), COSTS)
KV = {"call": 0, "direction": "forward", "step": 0, "what": "kv", "blocks": ((0,),), "peer": 0, "bytes": 64}
RECORDED = Timeline((
    Event(1, "walk", 10.0, 14.0, "ring forward", call=0, direction="forward"),
    Event(1, "post", 10.0, 10.5, "kv(0):0>1", call=0, direction="forward", step=0),
    Event(1, "move", 10.0, 13.0, "kv(0):0>1", waited=12.0, **KV),
    Event(1, "move", 12.0, 14.0, "kv(3):0>1", waited=13.0, **KV),
    Event(1, "wait", 12.0, 13.0, "kv(0):0>1", call=0, direction="forward", step=0),
    Event(2, "product", 9.0, 10.0, "q(0)*kv(0)"),
))  # fmt: skip


def test_seconds_are_counted_once():
    assert (RECORDED.start, RECORDED.seconds, RECORDED.ranks) == (9.0, 5.0, (1, 2))
    assert RECORDED.busy(1, "move") == 4  # 10-13 and 12-14
    assert RECORDED.busy(1, "post", "wait") == 1.5
    assert RECORDED.busy(1, "product") == 0
    assert RECORDED.busy(1, "walk", "move") == 4
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
    both = SIMULATED.after(RECORDED)
    assert both.seconds == RECORDED.seconds + SIMULATED.seconds
    assert both.events[: len(RECORDED.events)] == RECORDED.events
    assert min(event.start for event in both.events[len(RECORDED.events) :]) == 14


def test_what_overlaps_gets_lanes_of_its_own():
    spans = [(0, 4), (1, 2), (2, 3), (2, 5), (4, 6), (5, 5)]
    found = lanes(Event(0, "move", start, end, "") for start, end in reversed(spans))
    assert [(lane, e.start, e.end) for lane, e in found] == [
        (0, 0, 4), (1, 1, 2), (1, 2, 3), (2, 2, 5), (0, 4, 6), (1, 5, 5)
    ]  # fmt: skip


def test_a_trace_has_a_process_for_each_rank_and_a_track_for_each_thing_at_a_time(tmp_path):
    file = tmp_path / "trace.json"
    save_trace({"measured": RECORDED, "simulated": SIMULATED}, file)
    trace = json.loads(file.read_text())
    assert sorted(trace) == ["displayTimeUnit", "traceEvents"]
    names = {
        (e["pid"], e["tid"] if e["name"] == "thread_name" else None): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M"
    }
    processes = [name for (_, tid), name in names.items() if tid is None]
    assert processes == ["measured rank 1", "measured rank 2", *(f"simulated rank {rank}" for rank in range(4))]
    assert [names[0, tid] for tid in range(3)] == ["compute", "receive", "receive 2"]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(RECORDED.events) + len(SIMULATED.events)
    for span in spans:
        assert names[span["pid"], span["tid"]].split()[0] == TRACKS[span["cat"]]
        assert span["ts"] >= 0 <= span["dur"]
    moved = next(e for e in spans if e["cat"] == "move")
    assert (moved["name"], moved["ts"], moved["dur"]) == ("kv(0):0>1", 1e6, 3e6)
    assert moved["args"] == {**KV, "blocks": [[0]], "waited": 3e6}
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
    for timelines in ({"one": RECORDED}, {"one": RECORDED, "other": SIMULATED}):
        draw_timelines(timelines, tmp_path / "both.png", rows, second=1.0, unit="s")
        widths.append(image.imread(tmp_path / "both.png").shape[1])
    assert 1.7 <= widths[1] / widths[0] <= 2.3


def test_all_kinds_have_a_track_and_all_but_a_walk_and_what_leaves_a_color():
    assert set(TRACKS) == {*COLORS, "walk", "send"}
    assert set(NAMES) == set(COLORS)


# ---- clocks of several ranks


def barriers(late, first=0.0):
    """(by the first clock, by one that is ahead): who comes late keeps the other waiting."""
    ours = [Barrier(first + n, first + n + 0.3) for n in range(3)]
    theirs = [Barrier(first + n + 0.2 + late, first + n + 0.35 + late) for n in range(3)]
    return ours, theirs


@pytest.mark.parametrize("late", [0.0, 0.01, 1000.0, -1000.0])
def test_clocks_are_compared_by_barriers(late):
    found = ahead(*barriers(late))
    if abs(late) < 0.1:  # they may be the same
        assert found == 0
    else:  # neither left before the other came
        assert abs(found - late) <= 0.35 / 2
        assert abs(ahead(*reversed(barriers(late))) + late) <= 0.35 / 2


def test_an_event_moves_with_all_its_times():
    moved = shifted(RECORDED.events[2], -10)
    assert (moved.start, moved.end, moved.waited) == (0, 3, 2)
    assert shifted(RECORDED.events[0], 1).waited is None
