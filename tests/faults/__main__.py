"""Kills random ranks at random moments, and compares what goes on with runs that nobody interrupts.

    python -m tests.faults
    python -m tests.faults --kills 10 --changes 4 --results runs/faults.jsonl
    python -m tests.faults --table

A case is a run of 6 steps, which saves every second one. One of its ranks is killed (-9) in a step, in a save, or while
a second run resumes. Then a run goes on from the last checkpoint. Ranks are gloo processes of this machine.

ended: seconds from the kill to the end of the last other rank, each of which must have said why (2 s are allowed).
resumed at: the step of the checkpoint: the last that was saved, or the one that was being saved, if it is whole.
losses: of the resumed run against the same steps of the uninterrupted one, with the norms of gradients. They must be
the same to the last digit, and to 1e-5 of themselves where the number of ranks has changed.

Results go to a file, one line a case. A command that is interrupted goes on with the next case.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import random
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import tables
from tests.faults.ranks import BEGUN, PRINTED, RESUMING, SAVE_STEPS, SAVED, SAVING, STEPS, TRAINING, run
from tests.launch import on_ranks

COLUMNS = ["case", "by", "ZeRO", "ranks", "killed in", "rank", "ended", "resumed at", "losses", "verdict"]
LIMIT, SECONDS = 2.0, 120  # until ranks end after a kill; of a run, which hangs if it takes longer
DIGITS = 1e-5  # of losses, where the number of ranks changes
NOT_KILLED, ATTEMPTS = "not killed", 4
PACE = {TRAINING: 0.1, SAVING: 0.3, RESUMING: 0.3}  # seconds, where no run has told how long a phase takes


@dataclasses.dataclass(frozen=True)
class Case:
    """A kill, and the run that goes on. `share`: the part of the phase after which the rank is killed."""

    number: int
    driver: str
    stage: int
    ranks: int
    then: int  # ranks that go on
    victim: int
    phase: str
    step: int
    share: float

    @classmethod
    def drawn(cls, number: int, changes: bool) -> Case:
        draw = random.Random(f"{number} {changes}")
        ranks = draw.choice((2, 4)) if changes else 4
        phase = (TRAINING, SAVING, RESUMING)[number % 3]
        step = {TRAINING: draw.randint(1, STEPS), SAVING: draw.choice(range(SAVE_STEPS, STEPS + 1, SAVE_STEPS))}
        return cls(
            number=number,
            driver="loop" if changes or number % 5 else "Trainer",
            stage=2 + number // 3 % 2,
            ranks=ranks,
            then=6 - ranks if changes else ranks,
            victim=draw.randrange(ranks),
            phase=phase,
            step=step.get(phase, 0),
            share=draw.random(),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="cases in which as many ranks go on")
    parser.add_argument("--changes", type=int, default=20, help="cases in which 2 ranks go on after 4, or 4 after 2")
    parser.add_argument("--results", type=Path, default=Path("runs/faults.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the results so far, and run nothing")
    args = parser.parse_args()
    cases = [Case.drawn(number, changes=False) for number in range(args.kills)]
    cases += [Case.drawn(args.kills + number, changes=True) for number in range(args.changes)]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    if not args.table:
        known = {json.dumps(result["case"]) for result in done}
        left = [case for case in cases if json.dumps(dataclasses.asdict(case)) not in known]
        for case in tqdm(left, desc="kills", file=sys.stderr):
            done.append(judged(case))
            with args.results.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    print("\n".join(table(done)))
    raise SystemExit(any(result["verdict"] != "exact" for result in done))


def table(results: list[dict[str, Any]]) -> list[str]:
    tables.head(*COLUMNS)
    for found in results:
        case = Case(**found["case"])
        ranks = str(case.ranks) if case.ranks == case.then else f"{case.ranks}, then {case.then}"
        tables.row(
            str(case.number), case.driver, str(case.stage), ranks, f"{case.phase} {case.step or ''}", str(case.victim),
            f"{found['ended']:.2f} s", str(found["resumed"]), f"{found['difference']:.1e}", found["verdict"],
        )  # fmt: skip
    good = sum(result["verdict"] == "exact" for result in results)
    slowest = max((result["ended"] for result in results), default=0.0)
    return ["", f"{good} of {len(results)} exact; the last rank ended {slowest:.2f} s after a kill at most"]


@functools.cache
def uninterrupted(driver: str, stage: int, ranks: int) -> tuple[dict[int, list[float]], dict[str, float]]:
    """Return the losses of a run that nobody kills, and how many seconds a phase takes."""
    with tempfile.TemporaryDirectory() as folder:
        losses, seconds = on_ranks(ranks, run, driver, stage, Path(folder), 0, None, timeout=SECONDS)[0]
    return losses, PACE | {name: statistics.median(took) for name, took in seconds.items() if name != RESUMING}


def judged(case: Case) -> dict[str, Any]:
    """Run a case, and return what came of it. If the run ends before the kill, as on a machine that has become faster,
    the next one is killed sooner."""
    _, seconds = uninterrupted(case.driver, case.stage, case.ranks)
    found, delay = {"verdict": NOT_KILLED}, case.share * seconds[case.phase]
    for attempt in range(ATTEMPTS):
        if found["verdict"] == NOT_KILLED:
            with tempfile.TemporaryDirectory() as folder:
                found = judged_in(Path(folder), case, delay / 4**attempt)
    return {"case": dataclasses.asdict(case), **found}


def judged_in(folder: Path, case: Case, delay: float) -> dict[str, Any]:
    call = functools.partial(run, case.driver, case.stage)
    if case.phase == RESUMING:  # of a run that has saved, and is killed then
        first = TRAINING, SAVE_STEPS + 1, 0.0
        on_ranks(case.ranks, call, folder, case.victim, first, timeout=SECONDS, check=False)
        clear(folder)
    planned = case.phase, case.step, delay
    outcomes = on_ranks(case.ranks, call, folder, case.victim, planned, timeout=SECONDS, check=False)
    verdict, ended = end_of(case, folder, outcomes)
    begun, saved = (max(steps_of(folder, name), default=0) for name in (BEGUN, SAVED))
    clear(folder)
    again = on_ranks(case.then, call, folder, 0, None, timeout=SECONDS, check=False)
    if not all(isinstance(outcome[0], dict) for outcome in again):
        errors = [json.loads(file.read_text())["error"] for file in sorted(folder.glob("ended-*.json"))]
        verdict = " ".join([verdict, "not resumed:", *(errors or map(str, again))])
        return {"verdict": verdict, "ended": ended, "resumed": 0, "difference": math.inf}
    losses, reference = again[0][0], uninterrupted(case.driver, case.stage, case.then)[0]
    resumed = min(losses, default=STEPS + 1) - 1
    pairs = [(x, y) for step in losses for x, y in zip(losses[step], reference[step], strict=True)]
    difference = max((abs(x - y) / max(abs(y), 1e-30) for x, y in pairs), default=0.0)
    if difference > (DIGITS if case.ranks != case.then else 0.0):
        verdict = verdict or "other losses"
    if not saved <= resumed <= begun:
        verdict = verdict or f"saved {saved}, resumed at {resumed}"
    return {"verdict": verdict or "exact", "ended": ended, "resumed": resumed, "difference": difference}


def clear(folder: Path) -> None:
    for file in (folder / PRINTED, *folder.glob("ended-*.json"), folder / "killed"):
        file.unlink(missing_ok=True)


def steps_of(folder: Path, name: str) -> list[int]:
    return [int(file.name.removeprefix(name)) for file in folder.glob(f"{name}*")]


def end_of(case: Case, folder: Path, outcomes: list[Any]) -> tuple[str, float]:
    """Return what was wrong with the end of a run, "" for nothing, and how long after the kill it was."""
    if not (folder / "killed").exists():
        return NOT_KILLED, 0.0
    if any(outcome[0] == "Hang" for outcome in outcomes):
        return "hang", math.inf
    killed, others = float((folder / "killed").read_text()), set(range(case.ranks)) - {case.victim}
    files = [folder / f"ended-{rank}.json" for rank in sorted(others)]
    if not all(file.exists() for file in files):
        return "a rank ended without a word", math.inf
    ends = [json.loads(file.read_text()) for file in files]
    ended = max(end["at"] for end in ends) - killed
    if any(not end["lost"] for end in ends):
        return f"another error: {next(end['error'] for end in ends if not end['lost'])}", ended
    if len(set(re.findall(r"^\[rank\d+\]", (folder / PRINTED).read_text(), re.MULTILINE))) != 1:
        return "printed by other than one rank", ended
    return "" if ended <= LIMIT else "late", ended


if __name__ == "__main__":
    main()
