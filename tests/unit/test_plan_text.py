"""A plan as text: what is printed is read as the same plan, and what is wrong is shown where it stands."""

import itertools

import pytest

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.base.errors import ConfigError, PlanError
from ds_seqpar.core.compiler import schedules
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.schedules.plan import Plan
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.schedules import text
from ds_seqpar.testing import attention
from tests.grids import few_then_rest
from tests.oracle import assert_exact, dense, tensors
from tests.unit.commands import run
from tests.unit.plan_files import STAR, file_of, plans_of, save
from tests.unit.plans import DIRECTIONS
from tests.words import missing


@pytest.mark.parametrize("sizes", few_then_rest((1, 3, 4, 6), range(1, 17)))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_printed_is_read_as_the_same_plan(schedule, sizes):
    for size, overlap in itertools.product(sizes, (False, True)):
        for options in SCHEDULES[schedule].shapes(size):
            plans = plans_of(schedule, size, options, overlap)
            assert text.parse(file_of(plans)) == plans


CASES = [
    ("ring", 4, {}),
    ("double_ring", 4, {"ring_size": 2}),
    ("distflash", 5, {}),
    ("attention2d", 6, {"rows": 2}),
    ("wallfacer", 8, {"team": 2}),
    ("mesh", 8, {"mesh": (2, 1, 4)}),
    ("mesh", 8, {"mesh": (2, 2, 2)}),
    ("triangle", 6, {"strips": 1}),
    ("triangle", 6, {"strips": 2}),
]


@pytest.mark.parametrize(("schedule", "size", "options"), CASES, ids=str)
def test_the_printed_plan_of_a_schedule_is_a_schedule(capsys, tmp_path, schedule, size, options):
    words = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", *_values(value))]
    out, err, code = run(capsys, "show", "--schedule", schedule, "--size", size, *words, "--plan")
    assert (err, code) == ("", 0)
    name = save(tmp_path, out)
    given, read = SCHEDULES[schedule], schedules.schedule(name)
    assert {*read.layouts} >= {given.at(size, given.resolve(size, options, None)).default_layout}
    assert run(capsys, "show", "--schedule", name, "--size", size, "--plan")[0].count(f"{name} forward") == 1
    config = SequenceParallelConfig(schedule=name, size=size, ulysses=1, layout=read.default_layout)
    if schedule == "triangle":
        config = SequenceParallelConfig(
            schedule=name, size=size, ulysses=1, layout=f"pairs{options['strips']}".rstrip("1")
        )
    inputs = tensors(1, 4 * size, (4, 2), 8)
    found = attention(config, *inputs)
    assert_exact((found.out, found.dq, found.dk, found.dv), dense(*inputs))


def _values(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"layout": "contiguous"}, {"layout": "striped"}], ids=str)
@pytest.mark.parametrize("mask", [CAUSAL, FULL, Mask(window=5)], ids=str)
def test_a_plan_by_hand_is_exact(tmp_path, settings, mask):
    config = SequenceParallelConfig(schedule=save(tmp_path, STAR), size=6, ulysses=2, **settings)
    inputs = tensors(1, 48, (4, 2), 8)
    found = attention(config, *inputs, mask=mask)
    assert_exact((found.out, found.dq, found.dk, found.dv), dense(*inputs, mask=mask))


def test_auto_ulysses_leaves_the_ranks_of_the_plan(tmp_path):
    assert SequenceParallelConfig(schedule=save(tmp_path, STAR)).resolve(12, (8, 8)).ulysses == 4


def changed(old, new, count=1):
    assert old in STAR
    return STAR.replace(old, new, count)


ROW = STAR.splitlines()[4]  # of step 1, forward


def in_row(old, new):
    return STAR.replace(ROW, ROW.replace(old, new), 1)


# name -> (text, what the message has)
WRONG = {
    "an operand that is not there": (
        changed("0     q(0)*kv(0)", "0     q(0)*kv(1)"),
        ("rank 0, step 0", "q(0)*kv(1) needs kv(1)"),
    ),
    "a send that nobody receives": (
        changed("kv(1)>0 kv(1)>2 kv(0)<0 ", "kv(1)>0 kv(1)>2 "),
        ("rank 0, step 0", "kv(0):0>1", "rank 1"),
    ),
    "a product twice": (in_row("q(0)*kv(1)", "q(0)*kv(0)"), ("rank 0, step 1", "q(0)*kv(0) a second")),
    "a product never": (in_row("q(2)*kv(1)", ""), ("rank 2, step 1", "q(2)*kv(1) is missing")),
    "a gradient that stays away": (
        STAR.replace(" dkv(1)>1", "").replace(" dkv(1)<0", "").replace(" dkv(1)<2", ""),
        ("rank 0, step 1", "dkv(1) is left over"),
    ),
    "no action": (changed("kv(1)<1", "kv(1)=1"), ("rank 0, step 0", "'kv(1)=1'", "kv(0)>1")),
    "a result of the other direction": (in_row("q(0)*kv(1)", "dq(0)>1"), ("step 1", "'dq(0)>1'", "forward")),
    "a rank that is not there": (changed("kv(0)>2", "kv(0)>7"), ("rank 0, step 0", "kv(0):0>7", "does not exist")),
    "blocks that descend": (changed("q(0)*kv(1)", "q(0)*kv(1,0)"), ("step 1", "ascend", "(1,0)")),
    "a gather of a result": (changed("q(0)*kv(1)", "q(0)*kv(1) out(0,1)@"), ("step 1", "'out(0,1)@'", "%")),
    "a cell that is missing": (in_row("  q(2)*kv(0) q(2)*kv(1)", ""), ("step 1", "a cell for each")),
    "a step's number": (changed("\n1     ", "\n2     "), ("step 1", "its number, 1")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_shown_with_a_mark_at_its_step(tmp_path, name):
    content, words = WRONG[name]
    setting = save(tmp_path, content)
    with pytest.raises(PlanError) as caught:
        SequenceParallelConfig(schedule=setting)
    sentence, _, excerpt = str(caught.value).partition("\n")
    assert missing(sentence, f"sequence_parallel.schedule {setting}", *words) == []
    assert excerpt.startswith("star ")
    (marked,) = [line for line in excerpt.splitlines() if line.endswith("<-- here")]
    assert marked.split()[0] == sentence.partition("step ")[2].partition(":")[0] or name == "a step's number"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("forward and a backward", "no plan")),
        (STAR.partition("\n\n")[0], ("forward and a backward", "star forward")),
        (f"{STAR}\n{STAR}", ("forward and a backward",)),
        (changed("backward, 3 ranks", "backward, three ranks"), ("head", "three ranks")),
        (changed("forward, 3 ranks", "forward, 3000 ranks"), ("head", "3000 ranks")),
        (changed("rank 2", "rank 3"), ("star forward", "titles")),
        ("\n\n".join(f"x {way}, 1 ranks, 3 blocks each\nstep  rank 0\n0     -" for way in DIRECTIONS), ("no layout",)),
    ],
)  # fmt: skip
def test_a_text_that_is_no_pair_of_plans_is_refused(tmp_path, content, words):
    with pytest.raises(PlanError) as caught:
        schedules.schedule(save(tmp_path, content))
    assert missing(str(caught.value), "my.plan", *words) == []


def test_of_many_ranks_the_wrong_one_is_shown():
    plan = plans_of("ring", 16, {})["forward"]
    lines = plan.around(7, 3).splitlines()
    assert lines[1].split("  ") == ["step", "rank 3"]
    assert [line.split()[0] for line in lines[2:]] == ["5", "6", "7", "8", "9"]
    assert [line.endswith("  <-- here") for line in lines[2:]] == [False, False, True, False, False]


CAUSAL_ONLY = STAR
for later in ("q(0)*kv(1)", "q(0)*kv(2)", "q(1)*kv(2)"):
    CAUSAL_ONLY = CAUSAL_ONLY.replace(f" {later}", "")


def refusal(call, *arguments, **settings):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **settings)
    return str(caught.value)


def test_a_plan_of_other_ranks_or_for_another_mask_is_refused(tmp_path):
    name = save(tmp_path, STAR)
    said = refusal(SequenceParallelConfig(schedule=name, ulysses=1).resolve, 4)
    assert missing(said, name, "3 CP ranks", "got 4") == []
    assert "got 'file'" in refusal(SequenceParallelConfig, schedule="file")
    assert "no/such.plan" in refusal(SequenceParallelConfig, schedule="file:no/such.plan")
    with pytest.raises(ConfigError, match="rows"):
        SequenceParallelConfig(schedule=name, size=3, ulysses=1, rows=3).resolve(3)
    with pytest.raises(ConfigError, match="rotate_forward"):
        SequenceParallelConfig(schedule=name, size=3, ulysses=1, rotate_forward="q").resolve(3)


def test_a_plan_without_later_keys_is_for_contiguous_tokens_and_a_causal_mask(tmp_path):
    causal = plans_of("ring", 3, {"layout": "contiguous"})
    name = save(tmp_path, file_of(causal))
    assert schedules.schedule(name).layouts == ("contiguous",)
    config = SequenceParallelConfig(schedule=name, size=3, ulysses=1)
    inputs = tensors(1, 24, (4, 2), 8)
    assert_exact((attention(config, *inputs).out,), dense(*inputs)[:1])
    said = refusal(attention, config, *inputs, causal=False)
    assert missing(said, name, "q(0)*kv(1)", "contiguous") == []
    said = refusal(SequenceParallelConfig(schedule=name, size=3, ulysses=1, layout="zigzag").resolve, 3)
    assert missing(said, "layout", '"contiguous"', '"zigzag"') == []


def test_collectives_off_the_axes_of_a_grid_are_refused(tmp_path):
    gathers = "\n\n".join(
        f"x {way}, 4 ranks\nstep  rank 0  rank 1  rank 2  rank 3\n0     kv(0,1,3)@  kv(0,1,3)@  -  kv(0,1,3)@"
        for way in DIRECTIONS
    )
    with pytest.raises(PlanError, match="is missing"):
        schedules.schedule(save(tmp_path, gathers))


def test_the_same_plans_have_the_same_digest(tmp_path):
    def digest(content):
        return text.read(save(tmp_path, content), SCHEDULES.values()).digest

    other = changed("q(0)*kv(1) q(0)*kv(2)", "q(0)*kv(2) q(0)*kv(1)")
    assert digest(STAR) == digest(f"# with a comment\n{STAR}") != digest(other)
    assert all(isinstance(plan, Plan) for plan in text.parse(STAR).values())
