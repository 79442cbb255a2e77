"""Drawn calls of attention, and whether their results are those of dense attention: on virtual ranks, or on real ones.

A case is a dict of literals, drawn axis by axis by `drawn`. To add something that a call can have, add an axis there,
and use it in `config_of`, `inputs_of` or `Problem`; what only real ranks have is used in `attend`. `Truth` judges
results. tests/unit/test_exact.py runs cases on virtual ranks, tests/fuzz/test_drawn.py on gloo ranks, where something
may be wrong: {"rank": which rank (None: all), "sure": whether it must be refused, "case": what differs there}.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import random

import pytest
import torch

from ds_seqpar import SequenceParallel
from ds_seqpar import testing as virtual
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.heads import max_head_chunks
from ds_seqpar.core.compiler.sharding.layout import Run, multiple
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards
from ds_seqpar.core.runtime.operator import DENSE
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.data.balance import shards_of
from ds_seqpar.operators.latent import LATENT
from tests import oracle
from tests.fuzz.tables import CAUSAL, DTYPES, FORMS, MODES, SCALES, STRIDES, VALUES
from tests.unit.packs import parents_of

NAMES = ("out", "dq", "dk", "dv", "dsinks", "lse")
LAYOUTS = ("balanced", "contiguous", "striped", "zigzag")
# most of which Ulysses ranks do not divide
HEADS = ((4, 4), (4, 1), (6, 3), (14, 2), (7, 1), (2, 2), (5, 5), (12, 4))
WIDTHS = (8, 8, 8, 5, 1, 2, 3, 16, 31, 64, 80, 129, 256)  # of q and k
LATENT_WIDTH = 7
CAUSAL_MASKS = ("causal", "window", "documents", "windowed documents", "tree", "blocks")
MASKS = (*CAUSAL_MASKS, "full", "both sides", "full documents", "full tree", "prefix")
# tokens: in the configured layout as few as ranks can share, and more; any number of them, dealt by any layout; in
# runs that are cut anywhere, none too; and k and v of another length, so that some queries see no key
TOKENS = ("fewest", "more", "dealt", "cut", "other keys")
GOOD_SCALES = ("None", "0.3", "1", "tiny", "2.0", "numpy")
FLOATING = ("fp64", "fp32", "bf16", "fp16")
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
LARGEST = {**LIMITS, torch.bfloat16: 0.05, torch.float16: 0.05}  # of ordinary values, of the greatest number or of 1
# of these a cover takes no pairs: they are drawn anew in each case
MINOR = (
    "own", "seed", "width", "strides", "values", "tensor", "scale", "rank_order", "recompute_attention",
    "offload_checkpoints", "save_qkv_after_all_to_all", "told", "mode", "checkpoint", "lse", "grad", "grads_differ",
    "wrong", "latent_sent",
)  # fmt: skip


# ---- what is drawn


def drawn(schedule, most, dice):
    """A legal case on up to `most` ranks."""
    its, ulysses = SCHEDULES[schedule], dice.randint(1, min(4, most))
    cp_size = dice.choice([n for n in range(1, most // ulysses + 1) if list(its.shapes(n))])
    own = dice.choice(list(its.shapes(cp_size)))
    its = its.at(cp_size, own)
    one_way, owns_two = not its.can_compute(0, 1), its.blocks_per_rank > 1
    tokens = dice.choice(TOKENS[:3] if owns_two else TOKENS)
    layouts = its.layouts if tokens in TOKENS[:2] or owns_two else ("contiguous", "balanced") if one_way else LAYOUTS
    heads = dice.choice([heads for heads in HEADS if heads[0] >= ulysses])
    dtype, latent = dice.choice(("fp64", "fp64", *FLOATING)), dice.choice((False, False, True))
    values = "normal" if latent else dice.choice(("normal",) * 20 + VALUES)
    usual = values == "normal"
    softcap = dice.choice((None, 1.5)) if usual else None
    axes = [name for name, _ in its.axes(cp_size, own)]
    orders = [list(order) for order in itertools.permutations(("ulysses", *axes))]
    named = ("auto", "ulysses_intra", "ring_intra", *["collectives_intra"] * ("x" in axes))
    kept = dice.choice((True, True, False)) or schedule == "triangle"  # else a shape is chosen for what is left out
    return {
        "schedule": schedule,
        "cp_size": cp_size,
        "own": tuple(own.items()) if kept else tuple(dice.sample(list(own.items()), dice.randint(0, len(own)))),
        "ulysses": ulysses,
        "tokens": tokens,
        "layout": dice.choice(layouts),
        "mask": dice.choice(CAUSAL_MASKS if one_way else MASKS),
        "heads": (heads[0], 1) if latent else heads,
        "latent": latent,  # whether k and v are expanded from one that is sent
        "latent_sent": dice.choice(("auto", "latent", "expanded")),
        "head_chunks": 1 if latent else dice.choice(("auto", *range(1, 1 + min(4, max_head_chunks(*heads, ulysses))))),
        "batch": dice.choice((1, 2)),
        "width": dice.choice(WIDTHS),
        "dims": dice.choice(("equal", "narrow values", "wide values")) if usual else "equal",
        "dtype": dtype,
        "comm_dtype": dice.choice(("fp32", "bf16") if dtype in ("bf16", "fp16") else ("fp32",) * 4 + ("bf16",)),
        "kernel": dice.choice(("auto", "reference", *["cpu_flash"] * (softcap is None))),
        "rotate_forward": dice.choice(("auto", *its.moving_sides)),
        "rotate_backward": dice.choice(("auto", *its.moving_sides)),
        "overlap": dice.choice((False, True)),
        "early": dice.randint(0, 2),  # by how many steps a receive is posted before its message is sent, if not chosen
        "rank_order": dice.choice((*named, *orders, ["data", *orders[0]])),
        "recompute_attention": dice.choice((False, True)),
        "save_qkv_after_all_to_all": dice.choice(("auto", True, False)),
        "offload_checkpoints": dice.choice((False, True)),
        "scale": dice.choice(GOOD_SCALES),
        "softcap": softcap,
        "sinks": usual and dice.choice((False, True)),
        "values": values,
        "tensor": dice.randint(0, 3),  # that has the values, where one has
        "strides": tuple(dice.choice(sorted(STRIDES)) for _ in range(4)),
        "mode": dice.choice(("plain",) * 3 + MODES),
        "checkpoint": dice.choice((None, None, "reentrant", "other")),
        "lse": dice.choice((False, True)),
        "grad": tuple(dice.choice(((True,) * 3, [dice.random() < 0.5 for _ in range(3)]))),
        "grads_differ": not latent and dice.choice((False, True)),
        "told": dice.choice((False, True)),  # whether ranks are told the numbers of heads before the call
        "seed": dice.randint(0, 9999),
        "wrong": None,
    }


def with_a_mistake(case, ranks, dice):
    """The case with something wrong. ranks: which may be wrong alone; None for all."""
    who, one_kind = dice.choice(ranks), case["mode"] == "autocast"
    if dice.random() < 0.5 or ranks == (None,):
        (q, kv), cast = case["heads"], (*FLOATING, "fp8") if one_kind else FLOATING  # fp8: which autocast takes too
        changes = [{"batch": 0}, {"tokens": 0}, {"width": 0}]
        changes += [{"heads": heads} for heads in ((0, kv), (q, 0), (q, q + 1), (0, 0))]
        changes += [{"causal": name} for name in CAUSAL if name not in ("True", "False")]
        changes += [{"scale": name} for name in SCALES if name not in GOOD_SCALES]
        changes += [{"form": name} for name in FORMS if name != "good"]
        changes += [{"dtype": name} for name in DTYPES if name not in cast]
        return {**case, "wrong": {"rank": who, "sure": True, "case": dice.choice(changes)}}
    changes = [
        {"batch": case["batch"] + 1}, {"times": 2}, {"heads": tuple(2 * n for n in case["heads"])},
        {"width": case["width"] + 1}, {"mask": "causal" if case["mask"] == "window" else "window"},
        {"scale": "2.0" if case["scale"] == "0.3" else "0.3"}, {"lse": not case["lse"]},
    ]  # fmt: skip
    changes += [{"dtype": name} for name in FLOATING if name != case["dtype"] and not one_kind]
    if any(case["grad"]) and case["mode"] in ("plain", "autocast"):
        changes += [{"grad": (False,) * 3}, {"mode": "no_grad"}, {"mode": "inference"}]
    alone = who is None or size_of(case) == 1
    return {**case, "wrong": {"rank": who, "sure": not alone, "case": dice.choice(changes)}}


def can_be_wrong(case):
    return case["tokens"] in TOKENS[:2] and not case["latent"] and case["values"] == "normal"


def draws(schedule, most, count, seed):
    dice = random.Random(f"{schedule} {seed}")
    return [drawn(schedule, most, dice) for _ in range(count)]


def wrong_draws(count, seed):
    """Cases for virtual ranks that cannot be."""
    dice, found = random.Random(seed), []
    while len(found) < count:
        case = drawn(dice.choice(sorted(SCHEDULES)), 9, dice)
        if can_be_wrong(case):
            found.append(with_a_mistake(case, (None,), dice))
    return found


def drawn_for_ranks(dice, numbers=(2, 3, 4)):
    """A case for so many real ranks, of which groups may share sequences, and at times one that is wrong."""
    while True:
        ranks = dice.choice(numbers)
        case = drawn(dice.choice(sorted(SCHEDULES)), ranks, dice)
        size = size_of(case)
        if ranks % size or (size < ranks and dice.random() < 0.6) or Problem(case).is_impossible:
            continue
        if can_be_wrong(case) and dice.random() < 0.8:
            case = with_a_mistake(case, (None, *range(ranks)), dice)
        return {"ranks": ranks, **case}


# ---- what a case stands for


def size_of(case):
    return case["cp_size"] * case["ulysses"]


def config_of(case):
    named = case["tokens"] not in TOKENS[2:]
    fields = (
        "schedule", "ulysses", "head_chunks", "comm_dtype", "kernel", "overlap", "rotate_forward", "rotate_backward",
        "rank_order", "recompute_attention", "save_qkv_after_all_to_all", "offload_checkpoints",
    )  # fmt: skip
    return SequenceParallelConfig(
        size=size_of(case),
        **{name: case[name] for name in fields},
        **dict(case["own"]),
        **({"layout": case["layout"]} if named else {}),
        **({"latent_attention": case["latent_sent"]} if case["latent"] else {}),
    )


class Problem:
    """The tokens and the mask of a case.

    queries, keys: how many there are. held: of which each rank has what; shards: the same, or None for the configured
    layout.
    """

    def __init__(self, case):
        dice, self.case = random.Random(repr([case[name] for name in ("seed", "schedule", "layout", "cp_size")])), case
        self.config = config_of(case)
        self.queries, self.keys, lengths, self.shards = tokens_of(case, dice)
        self.mask = mask_of(case["mask"], self.queries, lengths, dice)
        layout = self.config.resolve(self.config.size).layout
        self.held = self.shards or EvenShards(layout, self.queries, case["cp_size"])
        self.seen = oracle.seen(self.mask, range(self.queries), range(self.keys))

    @functools.cached_property
    def is_impossible(self):
        """Whether any query sees a key of a block that the schedule never takes to its own: a later one in
        distflash."""
        if self.shards is None and not self.mask.blocks:
            return False
        its, blocks = self.config.resolve(self.config.size), range(self.held.size * self.held.blocks_per_rank)
        own = {name: getattr(its, name) for name, _ in self.case["own"]}
        schedule = SCHEDULES[self.case["schedule"]].at(self.case["cp_size"], own)
        q, kv = (
            [[p for run in self.held.runs(side, (b,)) for p in run.positions] for b in blocks] for side in ("q", "kv")
        )
        pairs = itertools.product(blocks, blocks)
        return any(self.seen[q[i]][:, kv[j]].any() for i, j in pairs if not schedule.can_compute(i, j))

    @property
    def scores(self):
        """What dense attention is asked for beside the mask."""
        sinks = torch.linspace(-3, 3, self.case["heads"][0], dtype=torch.float64) if self.case["sinks"] else None
        return {"scale": SCALES[self.case["scale"]], "softcap": self.case["softcap"], "sinks": sinks}


def tokens_of(case, dice):
    """(queries, keys, lengths of documents, shards in place of the layout's or None)."""
    size, kind = case["cp_size"], case["tokens"]
    if kind == 0:
        return 0, 0, (), None
    if kind in TOKENS[:2]:
        step = multiple(case["layout"], size * case["ulysses"], case["ulysses"])
        seq = (step if kind == "fewest" else step * max(2, 30 // step)) * case.get("times", 1)
        return seq, seq, cuts(dice, seq), None
    seq = dice.choice((1, 2, 3, dice.randint(4, 40), dice.randint(4, 40), 41))
    lengths = cuts(dice, seq)
    if kind == "dealt":
        return seq, seq, lengths, shards_of(case["layout"], lengths, size)
    ordered = not SCHEDULES[case["schedule"]].can_compute(0, 1)
    keys = dice.randint(0, 48) if kind == "other keys" else seq
    sides = [runs(dice, n, size, ordered) for n in ((seq,) if kind == "cut" else (seq, keys))]
    return seq, keys, lengths, UnevenShards(*sides)


def cuts(dice, seq):
    """Lengths of documents that fill so many tokens: from one to as many as tokens."""
    count = min(seq, dice.choice((1, 2, 4, 8, seq)))
    edges = [0, *sorted(dice.sample(range(1, seq), count - 1)), seq]
    return tuple(b - a for a, b in itertools.pairwise(edges))


def runs(dice, tokens, size, ordered):
    """Up to three runs of any lengths a rank; or one, in order."""
    edges = [0, *sorted(dice.randint(0, tokens) for _ in range((1 if ordered else 3) * size - 1)), tokens]
    pieces = [Run(a, 1, b - a) for a, b in itertools.pairwise(edges)]
    if not ordered:
        dice.shuffle(pieces)
    return [tuple(sorted(run for run in pieces[rank::size] if run.length)) for rank in range(size)]


def mask_of(kind, seq, lengths, dice):
    if seq == 0:
        return Mask()
    if "tree" in kind:
        parents = parents_of(len(lengths), lambda path: dice.randint(0, min(path, 4)))
        return Mask(causal=kind == "tree", documents=Mask.documents_of(lengths), parents=parents)
    if kind == "blocks":
        kind += dice.choice(("", " in documents", " and a window", " in windowed documents"))
    documents = Mask.documents_of(lengths) if "documents" in kind else (0,)
    window = dice.randint(1, seq) if "window" in kind or kind == "both sides" else None
    if kind == "prefix":
        return Mask(prefix=dice.randint(1, seq))
    right = dice.randint(0, seq) if kind == "both sides" else None
    causal = kind in CAUSAL_MASKS or "blocks" in kind
    spans = itertools.pairwise(sorted({*documents, *(dice.randint(0, seq) for _ in range(2 * seq // 3)), seq}))
    blocks = tuple(span for span in spans if "blocks" in kind and dice.random() < 0.6)
    fields = {"window_right": right, "blocks": blocks, "whole_blocks": dice.random() < 0.5}
    return Mask(causal=causal, window=window, documents=documents, **fields)


def inputs_of(case, queries, keys, sequence=0):
    """(q, k, v, do) of a sequence; k and v may be a latent and its matrix."""
    dice, (q_heads, kv_heads), dim = (
        torch.Generator().manual_seed(case["seed"] + 100 * sequence),
        case["heads"],
        case["width"],
    )
    v_dim = {"equal": dim, "narrow values": (dim + 1) // 2, "wide values": dim + 7}[case["dims"]]
    shapes = (queries, q_heads, dim), (keys, kv_heads, dim), (keys, kv_heads, v_dim), (queries, q_heads, v_dim)
    shapes = [(case["batch"], *shape) for shape in shapes]
    if case["latent"]:
        shapes[1:3] = (case["batch"], keys, LATENT_WIDTH), (q_heads, LATENT_WIDTH, dim + v_dim)
    made = [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes]
    if case["latent"]:
        made[2] /= LATENT_WIDTH**0.5
    return [valued(case, number, x).to(DTYPES[case["dtype"]]) for number, x in enumerate(made)]


def valued(case, number, x):
    values, equal = case["values"], {"equal rows": 1, "equal heads": 2, "equal elements": 3}
    if values in equal and x.shape[equal[values]]:
        return x.narrow(equal[values], 0, 1).expand_as(x).contiguous()
    if values in ("zeros", "one"):
        return torch.full_like(x, values == "one")
    if values.startswith("all ") or (values in ("huge", "tiny") and number == case["tensor"]):
        return x * (1e4 if values.endswith("huge") else 1e-30)
    return x


def laid_out(case, tensors):
    """These, each with the strides drawn for it."""
    return [STRIDES[name](x) if x.dim() == 4 else x for name, x in zip(case["strides"], tensors, strict=False)]


# ---- whether results are right


def expected(q, k, v, do, sinks=None, latent=False, **asked):
    """(out, dq, dk, dv, dsinks) in fp64; without sinks the first four."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    q, k, v, *others = leaves
    if latent:
        kv = torch.einsum("bnr,hre->bnhe", k, v)
        k, v = kv[..., : q.shape[3]], kv[..., q.shape[3] :]
    out = oracle.attention(q, k, v, sinks=others[0] if others else None, **asked)
    return out.detach(), *torch.autograd.grad(out, leaves, do.double())


def results(found):
    return [x for x in (found.out, found.dq, found.dk, found.dv, found.dsinks) if x is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """The right results by name, over the whole sequence.

    exact: in fp64. single: those of one rank in the dtype. natural: the size of what is added up, where the sum may be
    0. limit: of the error, relative to the greater of both. certain: whether rounding does not decide about gradients:
    backward takes exp(score - lse), and a score differs from the same one computed again. dtypes: that it is computed
    in, and those that it travels in. largest: the greatest error of ordinary cases, relative to the greatest number or
    1. slack: how many times the error of one rank there may be; a latent is expanded into other roundings.
    """

    exact: dict
    single: dict
    natural: dict
    limit: float
    certain: bool
    dtypes: tuple
    largest: float
    slack: float

    @classmethod
    def of(cls, problem, whole):
        """For global q, k, v, do; autocast makes bf16 of fp32 and fp16."""
        case, mask, scores = problem.case, problem.mask, problem.scores
        dtype = torch.bfloat16 if case["mode"] == "autocast" and whole[0].dtype != torch.float64 else whole[0].dtype
        usual = case["values"] == "normal"
        q, k, v, do = whole = [x.to(dtype) for x in whole]
        exact = dict(zip(NAMES, expected(*whole, mask=mask, latent=case["latent"], **scores), strict=False))
        keys, values = (x.double() for x in (k, v))
        if case["latent"]:
            kv = torch.einsum("bnr,hre->bnhe", keys, values)
            keys, values = kv[..., : q.shape[3]], kv[..., q.shape[3] :]
        exact["lse"] = oracle.lse(q.double(), keys, mask, **scores)
        single = exact
        if dtype not in LIMITS or not usual:
            alone = SequenceParallelConfig(size=1, kernel=case["kernel"])
            shards = UnevenShards(*([[(0, 1, n)] if n else []] for n in (problem.queries, problem.keys)))
            given = {"mask": mask, "operator": LATENT if case["latent"] else DENSE, "shards": shards}
            found = virtual.attention(alone, *whole, **given, **scores)
            single = exact | dict(zip(NAMES, results(found), strict=False))
        factor = q.shape[3] ** -0.5 if scores["scale"] is None else float(scores["scale"])
        top = [_top(x) for x in (q, keys, values, do)]
        size = factor * max(_products(q, keys), top[0] * top[1] * math.sqrt(q.shape[3]))
        given = max(_products(do, values), top[3] * top[2])  # of which the mean is taken away
        sizes = top[2], *(factor * given * x for x in (top[1], top[0])), top[3], 1.0, size
        rounding = 64 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * size
        least = 1.0 if case["latent"] else 0.0  # its sums over heads are larger than those of one head
        natural = {name: max(least, one) for name, one in zip(NAMES, sizes, strict=True)}
        narrow = 2**-7 * size_of(case) if case["comm_dtype"] == "bf16" else 0.0  # rounded once a hop
        limit = max(LIMITS.get(dtype, 1e-5), rounding) + narrow
        is_ordinary = usual and case["width"] <= 8 and case["scale"] in ("None", "0.3")
        return cls(
            exact=exact, single=single, natural=natural, limit=limit, slack=3.0 if case["latent"] else 2.0,
            largest=LARGEST[dtype] + narrow if is_ordinary else math.inf,
            certain=rounding <= math.log(torch.finfo(torch.float32).max),
            dtypes=(dtype, *[torch.bfloat16] * (case["comm_dtype"] == "bf16")),
        )  # fmt: skip

    def faults(self, found, part=lambda name, x: x):
        """What is wrong with these tensors by name; part: takes this rank's tokens of a whole one."""
        faults = {name: self._fault(name, x, part) for name, x in found.items()}
        return {name: fault for name, fault in faults.items() if fault}

    def _fault(self, name, found, part):
        exact, single = part(name, self.exact[name]), part(name, self.single[name]).to(found.dtype)
        if found.shape != exact.shape:
            return f"shape {tuple(found.shape)} instead of {tuple(exact.shape)}"
        beyond = self.natural[name] * max(1, *exact.shape) > torch.finfo(found.dtype).max  # chance decides
        if not exact.numel() or beyond or (name in NAMES[1:4] and not self.certain):
            return None
        if name == "lse" and not torch.equal(exact.isneginf(), found.isneginf()):
            return "another row sees no key"
        good = exact.isfinite() & single.isfinite() & (exact.abs() < 0.9 * torch.finfo(found.dtype).max)
        if not bool(found[good].isfinite().all()):
            return f"not finite where attention is, {int((~found[good].isfinite()).sum())} times"
        mine, alone = (x[good].double() - exact[good] for x in (found, single))
        smallest = max(torch.finfo(x).smallest_normal * torch.finfo(x).eps for x in (found.dtype, *self.dtypes))
        top = _top(self.exact[name])
        fault = self._too_far(mine, alone, max(self.natural[name], top, smallest / self.limit), name)
        if not fault and name != "lse" and _top(mine) > self.largest * max(1.0, top):
            return f"error {_top(mine):.3g}, limit {self.largest:.3g} of {max(1.0, top):.3g}"
        return fault

    def _too_far(self, mine, alone, size, name):
        if not mine.numel():
            return None
        if self.dtypes[0] in LIMITS or name == "lse":
            error, limit = _top(mine) / size, self.limit
            if name == "lse" and self.dtypes[0] not in LIMITS:  # torch's CPU kernel takes a coarser exp
                limit = max(limit, 2**-8 / size)
                if self.slack > 2:  # keys made from latents are rounded to the dtype, and scores are as far off
                    limit = max(limit, torch.finfo(self.dtypes[0]).eps / 2)
        else:  # as root mean squares: the greatest single error is chance
            error, single = (x.square().mean().sqrt().item() / size for x in (mine, alone))
            rounding = torch.finfo(self.dtypes[0]).eps / 2  # of one number, at the most; a quarter of it of many
            limit = self.slack * single + rounding * (0.25 + mine.numel() ** -0.5) + self.limit
        return None if error <= limit else f"error {error:.3g}, limit {limit:.3g}"


def _products(x, y):
    """The greatest finite magnitude of x . y, of a row of the one (B, S, Hq, D) and one of the other (B, T, Hkv, D)."""
    return _top(torch.einsum("bqhd,bkhd->bhqk", x.double(), y.double().repeat_interleave(x.shape[2] // y.shape[2], 2)))


def _top(x):
    """The greatest finite magnitude."""
    finite = x[x.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


# ---- on virtual ranks


def check(case, monkeypatch):
    """Equals dense attention, or is refused where the schedule cannot compute a product that is needed."""
    problem = Problem({**case, "mode": "plain"})
    early = property(lambda comm: case["early"], lambda *_: None)
    monkeypatch.setattr(virtual._VirtualComm, "early", early, raising=False)
    whole = inputs_of(case, problem.queries, problem.keys)
    given = {"mask": problem.mask, "shards": problem.shards, **problem.scores}
    attention = functools.partial(virtual.attention, operator=LATENT if case["latent"] else DENSE, **given)
    if problem.is_impossible:
        with pytest.raises(ConfigError, match=rf"{case['schedule']}.*causal"):
            attention(problem.config, *whole)
        return
    found = results(attention(problem.config, *laid_out(case, whole)))
    assert {x.dtype for x in found[:4]} == {DTYPES[case["dtype"]]}
    faults = Truth.of(problem, whole).faults(dict(zip(NAMES, found, strict=False)))
    assert not faults, (faults, case)
    assert not found[0][:, ~problem.seen.any(1)].any(), case  # a row that sees no key


def wrong_call(case):
    """Makes a call on virtual ranks that cannot be."""
    problem = Problem({**case, **case["wrong"]["case"]})
    case = problem.case
    q, k, v, do = laid_out(case, inputs_of(case, problem.queries, problem.keys))
    asked = {"causal": CAUSAL[case["causal"]]} if "causal" in case else {"mask": problem.mask}
    return virtual.attention(problem.config, *FORMS[case.get("form", "good")]([q, k, v]), do, **asked, **problem.scores)


# ---- on real ranks


def start(case):
    heads = case["heads"] if case["told"] else None
    sp = SequenceParallel(config_of(case), heads=heads)
    return sp, sp.data_rank


def attend(sp, case):
    """What is wrong with attention's results on this rank."""
    problem = Problem(case)
    places = [positions(sp, problem.held, side) for side in ("q", "kv")]
    whole = inputs_of(case, problem.queries, problem.keys, sp.data_rank)
    is_latent, form = case["latent"], case.get("form", "good")
    at = places[0], places[1], None if is_latent else places[1], places[0]
    q, k, v, do = laid_out(case, [x if p is None else x.index_select(1, p) for x, p in zip(whole, at, strict=True)])
    rank = sp.rank if case["grads_differ"] else 0
    wanted = [case["grad"][(i + rank) % 3] for i in range(3)]
    if is_latent:
        wanted = [any(wanted)] * 3
    leaves = [x.detach() for x in (q, k, v)]
    for x, grad in zip(leaves, wanted, strict=True):
        x.requires_grad_(grad and x.is_floating_point())
    asked = {"mask": problem.mask, **problem.scores, "return_lse": case["lse"], "shards": problem.shards}
    if "causal" in case:
        asked = {**asked, "mask": None, "causal": CAUSAL[case["causal"]]}
    if asked["sinks"] is not None:
        asked["sinks"].requires_grad_(any(case["grad"]))
    function = functools.partial(sp.latent_attention if is_latent else sp.attention, **asked)
    given = FORMS[form](leaves)
    with mode(case["mode"]):
        if case["checkpoint"] and form == "good" and torch.is_grad_enabled() and any(wanted):
            out = sp.checkpoint(function, *given, use_reentrant=case["checkpoint"] == "reentrant")
        else:
            out = function(*given)
    found = dict(zip(("out", "lse"), out, strict=True)) if case["lse"] else {"out": out}
    if found["out"].requires_grad:
        found["out"].backward(do.to(found["out"].dtype))
        found |= {name: x.grad for name, x in zip(NAMES[1:4], leaves, strict=True) if x.requires_grad}
        for name, x in (("dsinks", asked["sinks"]), *[("dv", v)] * is_latent):
            if x is not None:
                grad = leaves[2].grad if name == "dv" else x.grad
                found[name] = sp.comm.parts_of_all(grad.flatten(), name).double().sum(0).view(grad.shape).to(grad.dtype)
    truth = Truth.of(problem, whole)
    sides = {
        "out": places[0],
        "dq": places[0],
        "lse": places[0],
        "dk": places[1],
        "dv": None if is_latent else places[1],
    }

    def part(name, x):
        return x if sides.get(name) is None else x.index_select(1, sides[name])

    faults = truth.faults({name: x.detach() for name, x in found.items()}, part)
    if found["out"].dtype != truth.dtypes[0]:
        faults["dtype"] = found["out"].dtype
    if found["out"].requires_grad != (any(wanted) and case["mode"] not in ("no_grad", "inference")):
        faults["requires_grad"] = found["out"].requires_grad
    return faults


def positions(sp, shards, side):
    """The global positions of this rank's tokens."""
    held = oracle.positions_by_ulysses_rank(shards, side, sp.runtime.rank, sp.config.ulysses)[sp.runtime.ulysses.rank]
    return torch.tensor(held, dtype=torch.int64)


def mode(name):
    return {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    }.get(name, contextlib.nullcontext)()
