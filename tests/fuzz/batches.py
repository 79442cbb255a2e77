"""Drawn windows for `sp.shard_batches`: what is drawn, and what a rank does with it."""

import types

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.core.compiler.sharding.layout import divisors
from ds_seqpar.core.settings import LAYOUTS
from ds_seqpar.data.batch_layout import EQUAL
from ds_seqpar.data.inputs import tokens
from tests.fuzz import ranks

IGNORE = -100
KINDS = {"list": list, "tuple": tuple, "generator": lambda window: (batch for batch in window)}
MASKS = {"none": None, "int64": torch.int64, "bool": torch.bool, "fp32": torch.float32}
EXTRAS = {
    "weights": lambda shape: torch.rand(shape),
    "images": lambda shape: torch.ones(*shape, 2, 3, dtype=torch.bfloat16),
    "strided": lambda shape: torch.rand(*shape[::-1]).t(),
    "flags": lambda shape: torch.ones(shape, dtype=torch.bool),
    "complex": lambda shape: torch.ones(shape, dtype=torch.complex64),
    "name": lambda shape: "a word",
    "nothing": lambda shape: None,
    "list": lambda shape: [1, 2],
}


def _raising(window):
    yield from window[:-1]
    raise OSError("the disk is\nfull. Buy another.")


def _first(**changed):
    """A window whose first batch has something else; a function gets that batch."""

    def change(window):
        made = {name: make(window[0]) if callable(make) else make for name, make in changed.items()}
        return [{name: x for name, x in {**window[0], **made}.items() if x is not ...}, *window[1:]]

    return change


def _mask(*zeros):
    def make(batch):
        mask = torch.ones_like(batch["labels"])
        mask[:, list(zeros)] = 0
        return mask

    return make


# name -> a window that no rank can take, of a good one with at least 4 tokens and a label in each row
WRONG = {
    "no labels": _first(labels=...),
    "labels a list": _first(labels=lambda b: b["labels"].tolist()),
    "labels on meta": _first(labels=lambda b: b["labels"].to("meta")),
    "labels sparse": _first(labels=lambda b: b["labels"].to_sparse()),
    "mask a list": _first(attention_mask=lambda b: torch.ones_like(b["labels"]).tolist()),
    "a gap in the mask": _first(attention_mask=_mask(1)),
    "labels in the padding": _first(attention_mask=_mask(-2, -1), labels=lambda b: torch.ones_like(b["labels"])),
    "documents from 1 on": _first(position_ids=lambda b: torch.ones_like(b["labels"])),
    "lengths of another batch": _first(cu_seq_lens_q=lambda b: torch.tensor([0, b["labels"].numel() + 1])),
    "forms that differ": _first(
        position_ids=lambda b: torch.zeros_like(b["labels"]), seq_idx=lambda b: torch.zeros_like(b["labels"])
    ),
    "positions a list": _first(position_ids=[0, 1, 2, 3]),
    "positions too short": _first(position_ids=torch.arange(3)),
    "positions without dims": _first(position_ids=torch.tensor(0)),
    "no dims": _first(loss=torch.tensor(1.0)),
    "on meta": _first(other=lambda b: torch.ones_like(b["labels"]).to("meta")),
    "a key that is no word": lambda window: [{**window[0], 3: window[0]["labels"]}, *window[1:]],
    "empty sequences": _first(labels=lambda b: b["labels"][:, :0], input_ids=lambda b: b["input_ids"][:, :0]),
    "batch a tuple": lambda window: [tuple(window[0].items()), *window[1:]],
    "batch a tensor": lambda window: [window[0]["labels"], *window[1:]],
    "window a number": lambda window: 3,
    "window a batch": lambda window: window[0],
    "window a word": lambda window: "window",
    "a generator that fails": _raising,
}
# name -> a window that is as good, but not what the peers have
OTHER = {
    "one more": lambda window: [*window, window[0]],
    "other labels": _first(labels=lambda b: b["labels"].roll(1, 1) + 1),
    "other ids": _first(input_ids=lambda b: b["input_ids"] + 1),
    "padding on the left": _first(attention_mask=_mask(0)),
    "packed": _first(position_ids=lambda b: torch.zeros_like(b["labels"])),
    "a token less": _first(labels=lambda b: b["labels"][:, :-1], input_ids=lambda b: b["input_ids"][:, :-1]),
    "another dtype": _first(input_ids=lambda b: b["input_ids"].int()),
    "one tensor more": _first(more=lambda b: torch.ones(b["labels"].shape)),
    "one sequence more": lambda window: [_twice(window[0]), *window[1:]],
}


def _twice(batch):
    return {name: torch.cat([x, x]) if isinstance(x, torch.Tensor) and x.dim() > 1 else x for name, x in batch.items()}


@st.composite
def cases(draw):
    number = draw(st.sampled_from((2, 3, 4)))
    size = draw(st.sampled_from([*divisors(number), number, number]))
    ulysses = draw(st.sampled_from(divisors(size)))
    steps = draw(st.integers(1, 3))
    who = draw(st.sampled_from((None, *range(number))))
    kind = draw(st.sampled_from(("none", "wrong", "wrong", "other")))
    wrong = None
    if kind == "wrong":
        wrong = {"rank": who, "sure": True, "window": draw(st.sampled_from(sorted(WRONG)))}
    elif kind == "other" and size > 1:
        wrong = {"rank": who or 0, "sure": True, "window": draw(st.sampled_from(sorted(OTHER)))}
    return {
        "ranks": number,
        "section": {"size": size, "ulysses": ulysses, "layout": draw(st.sampled_from(LAYOUTS))},
        "batch": draw(st.integers(1, 3)),
        "times": draw(st.integers(2, 3)),
        "window": steps,
        "steps": draw(st.sampled_from((None, steps))),
        "training": draw(st.booleans()),
        "kind": draw(st.sampled_from(sorted(KINDS))),
        "read only": draw(st.booleans()),
        "mask": draw(st.sampled_from(sorted(MASKS))),
        "padding": draw(st.lists(st.integers(0, 2), min_size=3, max_size=3)),
        "positions": draw(st.sampled_from((None, "one dim", "two dims"))),
        "counting": draw(st.sampled_from((0.0, 0.5, 1.0))),
        "extras": sorted(draw(st.sets(st.sampled_from(sorted(EXTRAS)), max_size=3))),
        "seed": draw(st.integers(0, 99)),
        "wrong": wrong,
    }


def window_of(case, sp, data_rank):
    """The good window of the ranks that share a sequence."""
    torch.manual_seed(100 * case["seed"] + data_rank)
    return [_batch(case, sp.multiple * case["times"] * (2 if sp.multiple == 1 else 1)) for _ in range(case["window"])]


def _batch(case, seq):
    shape = case["batch"], seq
    ids = torch.randint(0, 99, shape)
    padding = torch.tensor(case["padding"])[: case["batch"], None] if case["mask"] != "none" else 0
    mask = torch.arange(seq).expand(shape) < seq - padding
    labels = torch.where(mask & (torch.rand(shape) < case["counting"]), ids, IGNORE)
    batch = {"input_ids": ids, "labels": labels, **{name: EXTRAS[name](shape) for name in case["extras"]}}
    if case["mask"] != "none":
        batch["attention_mask"] = mask.to(MASKS[case["mask"]])
    if case["positions"]:
        batch["position_ids"] = torch.arange(seq) if case["positions"] == "one dim" else torch.arange(seq).expand(shape)
    return batch


def run(case):
    """What came of a window."""

    def start():
        return SequenceParallel(SequenceParallelConfig.from_dict(case["section"])), "all"

    return ranks.outcome_of(case, start, lambda sp, wrong: _use(sp, case, wrong))


def _use(sp, case, wrong):
    sp.accumulation_steps = case["steps"]
    good = window_of(case, sp, sp.data_rank)
    window = {**WRONG, **OTHER}[wrong["window"]](good) if wrong else good
    if case["read only"] and isinstance(window, list):
        window = [types.MappingProxyType(batch) if isinstance(batch, dict) else batch for batch in window]
    given = KINDS[case["kind"]](window) if isinstance(window, list) else window
    inputs = dict.fromkeys(EXTRAS.keys() - {"name", "list"} | {"other", "more"}, tokens())
    found = sp.shard_batches(given, training=case["training"], inputs=inputs)
    return [fault for batch, mine in zip(good, found, strict=True) for fault in _faults(sp, case, batch, mine)]


def _faults(sp, case, batch, mine):
    """What is wrong with this rank's part of a batch."""
    places = sp.position_ids(batch["labels"].shape[1])
    wanted = {name: x for name, x in batch.items() if name not in ("attention_mask", "position_ids")}
    wanted["shift_labels"] = _shifted(batch)
    wanted = {name: x[:, places] if isinstance(x, torch.Tensor) else x for name, x in wanted.items()}
    wanted["placement"] = EQUAL
    wanted["position_ids"] = places.expand(case["batch"], -1)
    windows = [window_of(case, sp, group) for group in range(sp.data_size)]
    counting = sum(int((_shifted(batch) != IGNORE).sum()) for window in windows for batch in window)
    wanted["num_items_in_batch"] = max(1, counting) / (dist.get_world_size() * case["window"])
    return [f"{name} of {sorted(mine)}" for name in wanted.keys() | mine.keys() if not _same(name, wanted, mine)]


def _shifted(batch):
    last = torch.full_like(batch["labels"][:, :1], IGNORE)
    return torch.cat([batch["labels"][:, 1:], last], dim=1)


def _same(name, wanted, mine):
    if name not in wanted or name not in mine:
        return False
    a, b = wanted[name], mine[name]
    if isinstance(a, torch.Tensor):  # position_ids of a subclass note that they are read
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return type(a) is type(b) and a == b
