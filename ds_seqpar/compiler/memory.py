"""How much memory a call takes beyond the tensors that it is given: slots, running results and kernels' results.

They are followed from instruction to instruction, as the walker makes and frees them. Bytes; no tensor.

What a kernel allocates for itself and frees before it returns is not in it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from . import heads as dealing
from . import program as op
from .actions import ACCUMULATORS, Unit
from .compile import Bound, Compiler, Recipe
from .exchange import ROWS, SIDE, Kept
from .masks import Mask
from .program import is_own, methods_of
from .shape import ITEMSIZE, Shape, shape_of, token_bytes
from .shards import Shards, members_tokens, tokens_of
from .tiles import PIECE, Tile

INF = float("inf")
NOTHING = Kept(operands=False, out=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Bytes beyond a rank's own q, k, v and the gradient of its out. forward: the most at once, out included; kept:
    what stays of it for backward, out included; backward: the most at once, with what is kept and dq, dk, dv. inputs:
    whether backward also needs the rank's own q, k and v."""

    forward: int
    kept: int
    backward: int
    inputs: bool


def figures(forward: Bound, backward: Bound, kept: Kept) -> Figures:
    """Of a call's two programs. kept: what forward leaves for backward."""
    there = _Follower(forward, kept)
    most = there.run()
    stays = there.stays()
    return Figures(forward=most, kept=stays, backward=stays + _Follower(backward).run(), inputs=not kept.operands)


@functools.lru_cache(maxsize=8)  # stages of heads are alike
def peak(bound: Bound) -> int:
    """The greatest number of bytes that a walk of the program has at once, its results included."""
    return _Follower(bound).run()


@dataclasses.dataclass
class _Result:
    """A running result. loose: bytes outside of slots. whole: of all rows. wide: in the dtype of sums. placed: in the
    slot that it is sent from. end: the rows from that one on are blank."""

    loose: int = 0
    whole: bool = False
    wide: bool = False
    placed: bool = False
    end: float = 0

    @property
    def settled(self) -> bool:
        return self.whole and self.wide


class _Part(NamedTuple):
    """Rows that a call gives results for: groups of so many, each `step` after the one before."""

    first: int
    size: int
    step: int
    groups: int

    @property
    def end(self) -> int:
        return self.first + self.step * (self.groups - 1) + self.size

    def is_all(self, tokens: int) -> bool:
        return self.size * self.groups == tokens == self.end - self.first


class _Follower:
    """slots: bytes of each that is there. left: bytes of the results of the stage that was left last. whole: bytes of
    results of own tokens. saved: bytes of what is kept for backward."""

    def __init__(self, bound: Bound, kept: Kept = NOTHING) -> None:
        self.bound, self.kept, self.shape, self.program = bound, kept, bound.shape, bound.program
        self.forward = bound.program.direction == "forward"
        self.enters = {one.stage: one.arrived for one in bound.program.code if isinstance(one, op.Enter)}
        self.delta = any("delta" in trade.fields for arrived in self.enters.values() for trade, _ in arrived)
        self.slots: dict[int, int] = {}
        self.outs: dict[int, int] = {}  # outputs made again for visiting queries
        self.results: dict[Unit, _Result] = {}
        self.left: dict[str, int] = {}
        self.whole: dict[str, int] = {}
        self.saved = self.most = 0
        trades = (one.trade for one in bound.program.code if isinstance(one, op.PackHeads))
        self.sent = {field for trade in trades for field in trade.fields}

    def run(self) -> int:
        for instruction, frees in zip(self.program.code, self.program.frees, strict=True):
            FOLLOW[type(instruction)](self, instruction)
            for slot in frees:
                self.slots.pop(slot, None)
                self.outs.pop(slot, None)
        return self.most

    def stays(self) -> int:
        """What is left for backward, the results included."""
        return self.saved + sum(self.whole.values())

    def see(self, more: int = 0) -> None:
        """Notes how many bytes are there now. more: those that are there for a moment."""
        loose = sum(result.loose for result in self.results.values())
        held = sum(sum(sizes.values()) for sizes in (self.slots, self.outs, self.left, self.whole))
        self.most = max(self.most, held + self.saved + loose + more)

    def make(self, *slots: int, more: int = 0) -> None:
        for slot in slots:
            self.slots.setdefault(slot, self.bound.slot_bytes(slot))
        self.see(more)

    def pack(self, one: op.Pack) -> None:
        self.make(one.into)

    def post(self, one: op.Post) -> None:
        for transfer in one.receives:
            self.outs.pop(transfer.slot, None)
        self.make(*(transfer.slot for transfer in one.receives))

    def wait(self, one: op.Wait) -> None:
        """Nothing is made or freed."""

    def gather_start(self, one: op.GatherStart | op.ExchangeStart) -> None:
        self.make(one.received)

    exchange_start = gather_start

    def assemble(self, one: op.Assemble) -> None:
        self.outs.pop(one.into, None)
        self.make(one.into)

    def export(self, one: op.Export) -> None:
        result = self.results.pop(one.unit, _Result())
        self.settle(result, one.own, placed=one.into == one.own, more=result.loose)
        self.make(one.into)

    def fold(self, one: op.Fold) -> None:
        self.see(self.merging(self.bound.tokens(*one.unit), narrow=self.shape.travel != self.shape.wide))

    def settle(self, result: _Result, slot: int, placed: bool = False, more: int = 0) -> None:
        """The result becomes wide and of all rows, in its slot where it has to be."""
        if result.settled and (result.placed or not placed):
            return
        self.make(slot, more=more)
        result.loose, result.whole, result.wide, result.placed = 0, True, True, True

    def merging(self, tokens: int, narrow: bool) -> int:
        """Bytes for a moment while a result is added to another. Sums take none; a softmax takes some a row, and a
        wide copy of a narrow one, piece by piece."""
        if not self.forward:
            return 0
        shape = self.shape
        piece = shape.batch * tokens * shape.q_heads * shape.head_dim
        limit = max(PIECE, piece // 16)
        while piece > limit:
            piece -= piece // 2
        return ITEMSIZE[shape.wide] * (piece * narrow + 4 * (piece // shape.head_dim))

    def product(self, one: op.Product) -> None:
        if not self.forward and one.q_slot not in self.outs and (self.delta or not is_own(one.q_slot)):
            self.outs[one.q_slot] = self.rows("q", self.bound.tokens("q", one.q))
            self.see()
        for call in self.bound.calls(one.q, one.kv):
            self.call(one, call)

    def rows(self, kind: str, tokens: int) -> int:
        """Bytes of so many tokens' result in the inputs' dtype."""
        fields = self.shape.fields(self.program.direction, kind, self.shape.dtype)
        named = [f for f in fields if kind != "q" or f.name == "q"]
        return self.shape.batch * tokens * token_bytes(named)

    def call(self, one: op.Product, call: Tile) -> None:
        """Its operands, where they are copies, or its results; which go to the running ones, one after the other."""
        rows, columns = call.q1 - call.q0, call.k1 - call.k0
        sides = [
            (call.k0, columns, call.k_step) if unit[0] == "dkv" else (call.q0, rows, call.q_step)
            for unit, _ in one.results
        ]
        for (unit, slot), (first, *_) in zip(one.results, sides, strict=True):
            result = self.results.get(unit)
            if result and first < result.end:  # becomes wide before there is more
                self.settle(result, slot)
        found = [self.rows(unit[0], call.groups * side[1]) for (unit, _), side in zip(one.results, sides, strict=True)]
        self.see(sum(found) + self.copied(one, call, found))
        for index, ((unit, slot), (first, size, step)) in enumerate(zip(one.results, sides, strict=True)):
            if self.add(unit, slot, _Part(first, size, step, call.groups), sum(found)):
                found[index] = 0

    def add(self, unit: Unit, slot: int, part: _Part, new: int) -> bool:
        """Follows `Running.add`; returns whether the new tensors are kept as they are. new: bytes of the call's."""
        result, tokens = self.results.setdefault(unit, _Result()), self.bound.tokens(*unit)
        whole, narrow = part.is_all(tokens), self.shape.dtype != self.shape.wide
        kept = not result.loose and not result.placed and (whole or part.groups == 1)
        if kept:
            result.loose, result.whole, result.wide = self.rows(unit[0], part.size * part.groups), whole, not narrow
        elif part.first < result.end:
            self.settle(result, slot, more=new)
            self.see(new + self.merging(part.groups * min(part.size, part.step or part.size), narrow))
        elif not result.whole:
            all_rows = self.rows(unit[0], tokens)
            self.see(new + all_rows)
            result.loose, result.whole, result.wide = all_rows, True, not narrow
        if not kept and part.groups > 1 and part.step < part.size:  # what groups share is added
            self.settle(result, slot, more=new)
            self.see(new + self.merging(part.groups * part.step, narrow))
        result.end = max(result.end, part.end)
        return kept

    def copied(self, one: op.Product, call: Tile, found: list[int]) -> int:
        """Bytes of copies of operands, in reverse order or with the groups of several sequences side by side. Or of
        results in reverse order; and the mask of a block of a band."""
        turned = call.kind == "upper"
        sides = ((call.q0, call.q1, call.q_step, "q", one.q), (call.k0, call.k1, call.k_step, "kv", one.kv))
        copies = 0
        for first, last, step, kind, key in sides:
            apart = self.shape.batch > 1 and call.groups > 1 and call.groups * step != self.bound.tokens(kind, key)
            if turned or apart:
                tensors = 1 if self.forward or kind == "kv" else 3  # with the output and its gradient
                copies += tensors * self.rows(kind, call.groups * (last - first))
        masked = call.kind == "band" and self.bound.takes.rows
        mask = (call.q1 - call.q0) * (call.k1 - call.k0) * ITEMSIZE[self.shape.dtype] if masked else 0
        return max(copies, max(found)) if turned else copies + mask

    def merge(self, one: op.Merge) -> None:
        result, tokens = self.results.setdefault(one.unit, _Result()), self.bound.tokens(*one.unit)
        if one.into == one.arrived:
            self.see(self.merging(tokens, narrow=bool(result.loose) and not result.wide) if result.whole else 0)
            self.results[one.unit] = _Result(whole=True, wide=True, placed=True, end=INF)
        else:
            self.settle(result, one.into)
            result.end = INF
            self.see(self.merging(tokens, narrow=True))

    def scatter_start(self, one: op.ScatterStart) -> None:
        reduce = one.collective
        self.settle(self.results.pop((reduce.kind, reduce.whole)), one.own, placed=True)
        self.make(one.own, one.sent)
        part = reduce.part(self.program.rank)
        fields = self.shape.fields(self.program.direction, reduce.kind, self.shape.wide)
        tokens = self.shape.batch * self.bound.tokens(reduce.kind, part)
        own = tokens * token_bytes(fields)
        self.results[reduce.kind, part] = _Result(loose=own, whole=True, wide=True)
        self.make(one.received)

    def finish(self, one: op.Finish) -> None:
        """Results in the inputs' dtype, one tensor after the other; several blocks' in one tensor, made at once."""
        done = 0
        if self.program.parts > 1:
            done = sum(self.rows(unit[0], self.bound.tokens(*unit)) for unit, _ in one.results)
            for unit, slot in one.results:
                self.settle(self.results.setdefault(unit, _Result()), slot, more=done)
            self.see(done)
            return
        for unit, slot in one.results:
            result = self.results.setdefault(unit, _Result())
            if (result.loose and result.whole and not result.wide) or (
                result.settled and not result.placed and (self.shape.dtype == self.shape.wide)
            ):
                continue
            self.settle(result, slot)
            done += self.rows(unit[0], self.bound.tokens(*unit))
            self.see(done)

    # ---- heads

    def own(self, stage: int, field: str) -> int:
        """Bytes of own tokens of the stage's heads."""
        heads, part, whole = self.bound.heads, self.shape, self.bound.shards
        tokens = members_tokens(whole, SIDE.get(field, "q"), self.program.rank, heads.members.degree)
        held = heads.held(stage, field)
        width = ITEMSIZE[part.wide] if field in ROWS else part.head_dim * part.itemsize
        return part.batch * tokens[heads.members.member] * (held.stop - held.start) * width

    def pack_heads(self, one: op.PackHeads) -> None:
        stage, inward, fields = one.trade
        if inward:
            self.make(one.into, more=sum(self.own(stage, field) for field in fields if field in ROWS))
            return
        there = sum(self.left[field] for field in fields)
        if len(fields) > 1 or self.shape.batch > 1:
            self.make(one.into)
        else:  # what is sent is the result as it lies
            self.slots[one.into] = there
        for field in fields:
            del self.left[field]

    def enter(self, one: op.Enter) -> None:
        self.shape = self.bound.shapes[one.stage]

    def leave(self, one: op.Leave) -> None:
        """The results of the stage; what it was given goes, or is kept."""
        tokens = {side: tokens_of(self.bound.shards, side, self.program.rank) for side in ("q", "kv")}
        self.results.clear()
        self.outs.clear()
        for kind in ACCUMULATORS[self.program.direction]:
            for field in self.shape.fields(self.program.direction, kind, self.shape.dtype):
                rows = self.shape.batch * tokens[SIDE.get(field.name, "q")]
                self.left[field.name] = rows * field.elements * field.itemsize
        if self.forward:
            arrived = sum(self.slots[slot] for _, slot in self.enters[one.stage])
            self.saved += self.kept.operands * arrived
            for name in ("lse", "out") if self.kept.out else ("lse",):  # what is kept is not there twice
                self.saved, self.left[name] = self.saved + self.left[name], 0
            if "lse" not in self.sent:
                del self.left["lse"]
        if self.bound.heads.members.degree == 1:
            for name in list(self.left):
                self.put(one.stage, name, self.left.pop(name))

    def unpack_heads(self, one: op.UnpackHeads) -> None:
        for field in one.trade.fields:
            self.put(one.trade.stage, field, self.own(one.trade.stage, field))

    def put(self, stage: int, field: str, size: int) -> None:
        stages = len(self.bound.heads.stages)
        if field not in self.whole:
            self.whole[field] = sum(self.own(each, field) for each in range(stages)) if stages > 1 else size
        self.see(size if stages > 1 else 0)


FOLLOW = methods_of(_Follower)


def fewest_stages(recipe: Recipe, members: int, travel: str, own: Shape, mask: Mask, shards: Shards) -> int:
    """The fewest stages of heads with which attention takes no more memory than its q, k, v and out. own: a rank's own
    tensors. It looks at the program of the first inner rank, which all know. members: of Ulysses; travel: the setting
    of `shape_of`."""
    compiler, free = Compiler(recipe, 0), dealing.free_stages(own.q_heads, own.kv_heads, members)
    for count in free:
        heads = (*dealing.most(own.q_heads // count, own.kv_heads // count, members), own.head_dim)
        shape = shape_of(travel, own.dtype, own.batch, heads)
        taken = max(peak(compiler.bound(way, mask, shards, shape)) for way in ("forward", "backward"))
        whole = 2 * sum(heads[:2]) * count * own.head_dim * own.batch * own.itemsize
        if taken <= whole * tokens_of(shards, "q", 0):
            return count
    return free[-1]
