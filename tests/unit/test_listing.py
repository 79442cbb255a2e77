"""A program as text: `python -m ds_seqpar show --program RANK`, and what docs/how_it_works.md quotes of it."""

import re
from pathlib import Path

import pytest

from ds_seqpar.__main__ import main
from ds_seqpar.analysis import memory
from ds_seqpar.analysis.listing import listing
from ds_seqpar.core.compiler.compile import Compiler, Recipe
from ds_seqpar.core.compiler.program.instructions import slots_of
from ds_seqpar.core.compiler.program.shape import Shape
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards
from tests.unit.plans import DIRECTIONS, shaped
from tests.words import missing

HOW_IT_WORKS = Path(__file__).resolve().parents[2] / "docs" / "how_it_works.md"


def _bound(schedule, direction, travel):
    its = SCHEDULES[schedule]
    ranks = 4 if list(its.shapes(4)) else 6
    recipe = Recipe(schedule=its, topology=shaped(schedule, ranks))
    shape = Shape(batch=1, q_heads=4, kv_heads=2, head_dim=8, dtype="bfloat16", comm_dtype=travel)
    return Compiler(recipe, 1).bound_inner(direction, CAUSAL, EvenShards(its.default_layout, 4 * ranks, ranks), shape)


@pytest.mark.parametrize("travel", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_instruction_is_a_line_with_its_step_and_slots(schedule, direction, travel):
    bound = _bound(schedule, direction, travel)
    code, slots, most = listing(bound).split("\n\n")
    for one, line in zip(bound.program.code, code.splitlines()[2:], strict=True):
        assert int(line.split()[0]) == one.step
        assert {int(number) for number in re.findall(r"\[(\d+)\]", line)} >= set(slots_of(one)), line
    for number, line in enumerate(slots.splitlines()[1:]):
        assert line.startswith(f"[{number}] ")
        assert line.endswith(f" {bound.slot_bytes(number)}")
    assert int(re.findall(r"\d+", most)[0]) == memory.peak(bound)


# its queries are alone in a document of which nobody has keys: blank results, out (64 bytes) and lse (16) beside wide
# ones (128 and 16)
def test_a_rank_that_computes_nothing_has_a_program_and_a_figure():
    recipe = Recipe(schedule=SCHEDULES["ring"], topology=shaped("ring", 2))
    shards = UnevenShards([[(0, 1, 4)], [(4, 1, 4)]], [[(0, 1, 4)], []])
    shape = Shape(batch=1, q_heads=1, kv_heads=1, head_dim=8, dtype="bfloat16", comm_dtype="float32")
    bound = Compiler(recipe, 1).bound_inner("forward", Mask(documents=(0, 4)), shards, shape)
    assert "finish: out(1) [0]" in listing(bound)
    assert memory.peak(bound) == 64 + 16 + 128 + 16


def test_show_prints_a_rank_that_exists(capsys):
    assert main(["show", "--size", "4", "--program", "3"]) == 0
    assert missing(capsys.readouterr().out, "ring forward", "CP rank 3 of 4") == []
    for words, said in (
        (["--program", "4"], ("--program", "4 CP ranks", "got 4")),
        (["--program", "1", "--seq", "17"], ("multiple of 8", "got 17")),
    ):
        assert main(["show", "--size", "4", *words]) == 2
        assert missing(capsys.readouterr().err, *said) == []


def test_the_page_on_how_it_works_quotes_what_is_printed(capsys):
    quoted = re.findall(r"```text\n(.*?)```", HOW_IT_WORKS.read_text(encoding="utf-8"), re.DOTALL)
    command = re.search(r"python -m ds_seqpar (show .*--program .*)", HOW_IT_WORKS.read_text(encoding="utf-8"))
    assert main(command[1].split()) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = [line for block in quoted if block.startswith(("ring", "step", "slot")) for line in block.splitlines()]
    assert len(rows) > 20
    assert [line for line in rows if line.rstrip() not in printed] == []
