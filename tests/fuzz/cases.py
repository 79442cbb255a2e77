"""What the fuzz draws, as Python literals: a good section and call by construction, and at times something wrong in it.

A case is a dict. ranks: how many there are. section: as in the JSON. heads: what the constructor is told. call: what
attention is given. wrong: None, or {"rank": which one (None: all), "sure": whether it must be refused, and "call": what
is otherwise on that rank}. Sections and heads that cannot be: tests/unit/test_config.py, tests/dist/test_refusals.py.
"""

import itertools
import math

from hypothesis import strategies as st

from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import divisors, multiple
from ds_seqpar.core.settings import COMM_DTYPES
from tests.fuzz.tables import CAUSAL, DTYPES, FORMS, MODES, SCALES, STRIDES, VALUES

FLOATING = ("fp64", "fp32", "bf16", "fp16")
ON_CPU = ("auto", "cpu_flash", "reference")
GOOD_SCALES = ("None", "0.3", "1", "tiny", "2.0", "numpy")


@st.composite
def sections(draw, sizes):
    """A good section for ranks of which `sizes` may share a sequence."""
    size = draw(st.sampled_from(sizes))
    ulysses = draw(st.sampled_from(divisors(size)))
    inner = size // ulysses
    schedule = draw(st.sampled_from(sorted(name for name, its in SCHEDULES.items() if list(its.shapes(inner)))))
    axes, shape = draw(_shapes(schedule, inner))
    its = SCHEDULES[schedule].at(inner, shape)
    section = {
        "size": size,
        "ulysses": ulysses,
        "schedule": schedule,
        **shape,
        "layout": draw(st.sampled_from(("auto", *its.layouts))),
        "rotate_forward": draw(st.sampled_from(("auto", *its.moving_sides))),
        "rotate_backward": draw(st.sampled_from(("auto", *its.moving_sides))),
        "overlap": draw(st.booleans()),
        "rank_order": draw(_rank_orders(axes)),
        "comm_dtype": draw(st.sampled_from((*COMM_DTYPES, "fp32"))),
        "kernel": draw(st.sampled_from(ON_CPU)),
        "head_chunks": draw(st.sampled_from((1, "auto"))),
        "recompute_attention": draw(st.booleans()),
        "save_qkv_after_all_to_all": draw(st.sampled_from(["auto", True, False])),
        "offload_checkpoints": draw(st.booleans()),
    }
    common = (
        "layout", "rotate_forward", "rotate_backward", "overlap", "rank_order", "kernel", "recompute_attention",
        "save_qkv_after_all_to_all",
    )  # fmt: skip
    left_out = draw(st.sets(st.sampled_from(common)))
    return {name: value for name, value in section.items() if name not in left_out}


@st.composite
def _shapes(draw, schedule, inner):
    """(names of the CP axes, the schedule's own fields)."""
    rows = draw(st.sampled_from(divisors(inner)))
    if schedule == "double_ring":
        return ("inner_ring", "outer_ring"), draw(st.sampled_from([{}, {"ring_size": rows}]))
    both = {"rows": rows, "cols": inner // rows}
    if schedule == "attention2d":
        return ("x", "y", "z"), draw(st.sampled_from([{}, both, {"rows": rows}, {"cols": rows}]))
    if schedule == "wallfacer":
        team = draw(st.sampled_from([c for c in divisors(inner) if inner % (c * c) == 0]))
        return ("x", "y", "z"), draw(st.sampled_from([{}, {"team": team}]))
    if schedule == "mesh":
        more = draw(st.sampled_from(divisors(inner // rows)))
        return ("x", "y", "z"), draw(st.sampled_from([{}, {"mesh": [rows, more, inner // rows // more]}]))
    own = draw(st.sampled_from(list(SCHEDULES[schedule].shapes(inner))))
    return tuple(name for name, _ in SCHEDULES[schedule].axes(inner, own)), own


def _rank_orders(axes):
    collectives = ("collectives_intra",) if "x" in axes else ()
    orders = [list(order) for order in itertools.permutations(("ulysses", *axes))]
    return st.sampled_from(["auto", "ulysses_intra", "ring_intra", *collectives, *orders, ["data", *orders[0]]])


@st.composite
def calls(draw, section, largest=64):
    """What attention can be given under a good section; tokens are those of a rank."""
    ulysses, its = section["ulysses"], SCHEDULES[section["schedule"]]
    layout = section.get("layout", "auto")
    layout = its.default_layout if layout == "auto" else layout
    tokens = multiple(layout, section["size"], ulysses) // section["size"]
    kv_heads = draw(st.sampled_from(divisors(ulysses))) * draw(st.sampled_from((1, 1, 2)))
    if ulysses % kv_heads and kv_heads % ulysses:
        kv_heads = ulysses
    heads = math.lcm(ulysses, kv_heads) * draw(st.integers(1, 3))
    if draw(st.booleans()):  # such that Ulysses ranks may not divide them
        kv_heads = draw(st.integers(1, 5))
        heads = kv_heads * (-(-ulysses // kv_heads) + draw(st.integers(0, 2)))
    return {
        "batch": draw(st.integers(1, 3)),
        "tokens": tokens * draw(st.integers(1, max(1, min(5, largest // tokens // section["size"])))),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from((1, 2, 3, 5, 8, 16, 31, 64, 80, 129, 256))),
        "dtype": draw(st.sampled_from(FLOATING)),
        "strides": draw(st.tuples(*[st.sampled_from(sorted(STRIDES))] * 4)),
        "causal": draw(st.sampled_from(("True", "False") if its.can_compute(0, 1) else ("True",))),
        "scale": draw(st.sampled_from(GOOD_SCALES)),
        "grad": draw(st.tuples(*[st.booleans()] * 3)),
        "grads_differ": draw(st.booleans()),
        "mode": draw(st.sampled_from(("plain", *MODES))),
        "checkpoint": draw(st.sampled_from((None, "reentrant", "other"))),
        "lse": draw(st.booleans()),
        "values": draw(st.sampled_from(("normal", "normal", *VALUES))),
        "place": draw(st.tuples(st.integers(0, 3), *[st.integers(0, 999)] * 4)),
        "form": "good",
        "seed": draw(st.integers(0, 99)),
    }


@st.composite
def surely_wrong(draw, call):
    """Changes to a call that no rank can take."""
    heads = call["heads"]
    numbers = [{"batch": 0}, {"tokens": 0}, {"heads": 0}, {"kv_heads": 0}, {"head_dim": 0}, {"kv_heads": heads + 1}]
    numbers += [{"heads": 0, "kv_heads": 0}]
    cast = (*FLOATING, "fp8") if call["mode"] == "autocast" else FLOATING  # which torch's autocast takes too
    return draw(
        st.sampled_from(numbers)
        | st.sampled_from([{"causal": name} for name in CAUSAL if name not in ("True", "False")])
        | st.sampled_from([{"scale": name} for name in SCALES if name not in GOOD_SCALES])
        | st.sampled_from([{"form": name} for name in FORMS if name != "good"])
        | st.sampled_from([{"dtype": name} for name in DTYPES if name not in cast])
    )


def differing(call):
    """Changes to a call that are wrong where one rank has them and its peers have not."""
    other = {"True": "False", "False": "True"}[call["causal"]]
    changes = [
        {"batch": call["batch"] + 1},
        {"tokens": 2 * call["tokens"]},
        {"heads": 2 * call["heads"]},
        {"head_dim": call["head_dim"] + 1},
        {"causal": other},
        {"scale": "2.0" if call["scale"] == "0.3" else "0.3"},
        {"lse": not call["lse"]},
    ]
    changes += [{"dtype": name} for name in FLOATING if name != call["dtype"] and call["mode"] != "autocast"]
    if any(call["grad"]) and call["mode"] in ("plain", "autocast"):
        changes += [{"grad": (False,) * 3}, {"mode": "no_grad"}, {"mode": "inference"}]
    return st.sampled_from(changes)


@st.composite
def cases(draw, virtual=False):
    """virtual: all ranks share a sequence, and all are given the same."""
    number = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 9, 12, 16) if virtual else (2, 3, 4)))
    section = draw(sections([number] if virtual else [*divisors(number), number, number]))
    call = draw(calls(section))
    told = draw(st.sampled_from([None, (call["heads"], call["kv_heads"])]))
    who = None if virtual else draw(st.sampled_from((None, *range(number))))
    kind = draw(st.sampled_from(("none", "none", "none", "sure", "differs")))
    wrong = None
    if kind == "sure":
        wrong = {"rank": who, "sure": True, "call": draw(surely_wrong(call))}
    elif kind == "differs":
        alone = who is None or section["size"] == 1
        wrong = {"rank": who, "sure": not alone, "call": draw(differing(call))}
    return {"ranks": number, "section": section, "heads": told, "call": call, "wrong": wrong}
