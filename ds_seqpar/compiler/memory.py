"""How much memory a call takes beyond the tensors that it is given: slots, accumulators and kernels' results.

A tracker follows the program from instruction to instruction and counts bytes as the walker makes and frees tensors; it
needs no tensor. What a kernel allocates for itself and frees before it returns is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from .compile import BoundProgram, Compiler, Recipe
from .program import instructions as op
from .program.instructions import is_local, methods_of
from .program.shape import ITEMSIZE, Shape, shape_of, token_bytes
from .program.ulysses import PER_ROW, SIDE, SavedForBackward
from .schedules.actions import ACCUMULATORS, Unit
from .sharding.heads import free_head_chunk_counts, largest_share
from .sharding.masks import Mask
from .sharding.shards import Shards, tokens_by_ulysses_rank, tokens_of
from .tiles.tiles import MERGED_AT_ONCE, Tile

INF = float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Bytes beyond a rank's local q, k, v and the gradient of its out. forward: the most at once, out included; saved:
    what forward saves for backward, out included; backward: the most at once, with what is saved and dq, dk, dv.
    inputs: whether backward also needs the rank's own q, k and v."""

    forward: int
    saved: int
    backward: int
    inputs: bool


def figures(forward: BoundProgram, backward: BoundProgram, choice: SavedForBackward) -> Figures:
    """The figures of a call, from its two programs. choice: what forward saves for backward."""
    tracker = _Tracker(forward, choice)
    peak_forward, saved = tracker.run(), tracker.saved_with_results()
    peak_backward = saved + _Tracker(backward).run()
    return Figures(forward=peak_forward, saved=saved, backward=peak_backward, inputs=not choice.qkv)


@functools.lru_cache(maxsize=8)  # head chunks are alike, and ask for the same
def peak(bound: BoundProgram) -> int:
    """The most bytes that a walk of the program has at once, its results included."""
    return _Tracker(bound).run()


@dataclasses.dataclass
class _Result:
    """An accumulator. loose: its bytes outside of slots. all_rows: it has all rows. in_accum_dtype: it is in the dtype
    of sums. in_slot: it is in the slot that it is sent from. end: the rows from there on are blank."""

    loose: int = 0
    all_rows: bool = False
    in_accum_dtype: bool = False
    in_slot: bool = False
    end: float = 0

    @property
    def settled(self) -> bool:
        return self.all_rows and self.in_accum_dtype


class _Rows(NamedTuple):
    """Rows that a launch gives results for: groups of so many, each `step` after the one before."""

    first: int
    size: int
    step: int
    groups: int

    @property
    def end(self) -> int:
        return self.first + self.step * (self.groups - 1) + self.size

    def are_all(self, tokens: int) -> bool:
        """Whether these are all rows of a result of so many tokens, each once."""
        return self.size * self.groups == tokens == self.end - self.first


class _Tracker:
    """Bytes of all tensors while a program is walked. slots: of each slot that is there. head_chunk_results: of the
    results of the head chunk that was left last. local_results: of results of local tokens. saved: of what forward
    saves."""

    def __init__(self, bound: BoundProgram, choice: SavedForBackward = SavedForBackward.NOTHING) -> None:
        self.bound, self.choice, self.shape, self.program = bound, choice, bound.shape, bound.program
        self.forward = bound.program.direction == "forward"
        self.enters = {one.head_chunk: one.arrived for one in bound.program.code if isinstance(one, op.Enter)}
        self.delta = any("delta" in exchange.fields for arrived in self.enters.values() for exchange, _ in arrived)
        self.slots: dict[int, int] = {}
        self.outs: dict[int, int] = {}  # slot of visiting queries -> bytes of their out, which is made again
        self.results: dict[Unit, _Result] = {}
        self.head_chunk_results: dict[str, int] = {}
        self.local_results: dict[str, int] = {}
        self.saved = self.most = 0
        packed = (one.exchange for one in bound.program.code if isinstance(one, op.PackHeads))
        self.sent = {field for exchange in packed for field in exchange.fields}

    def run(self) -> int:
        for instruction, frees in zip(self.program.code, self.program.frees, strict=True):
            TRACK[type(instruction)](self, instruction)
            for slot in frees:
                self.slots.pop(slot, None)
                self.outs.pop(slot, None)
        return self.most

    def saved_with_results(self) -> int:
        """Bytes that are left after forward: what is saved for backward, and the results."""
        return self.saved + sum(self.local_results.values())

    def note(self, more: int = 0) -> None:
        """Notes how many bytes are there now. more: bytes that are there for a moment only."""
        loose = sum(result.loose for result in self.results.values())
        held = sum(
            sum(sizes.values()) for sizes in (self.slots, self.outs, self.head_chunk_results, self.local_results)
        )
        self.most = max(self.most, held + self.saved + loose + more)

    def make(self, *slots: int, more: int = 0) -> None:
        for slot in slots:
            self.slots.setdefault(slot, self.bound.slot_bytes(slot))
        self.note(more)

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
        self.settle(result, one.accumulator, in_slot=one.into == one.accumulator, more=result.loose)
        self.make(one.into)

    def fold(self, one: op.Fold) -> None:
        self.note(self.merging(self.bound.tokens(*one.unit), narrow=self.shape.comm_dtype != self.shape.accum_dtype))

    def settle(self, result: _Result, slot: int, in_slot: bool = False, more: int = 0) -> None:
        """The result is widened to accum_dtype and gets all rows, in the slot. in_slot: whether it has to be in the
        slot."""
        if result.settled and (result.in_slot or not in_slot):
            return
        self.make(slot, more=more)
        result.loose, result.all_rows, result.in_accum_dtype, result.in_slot = 0, True, True, True

    def merging(self, tokens: int, narrow: bool) -> int:
        """Bytes for a moment while a result is merged into another. Sums take none. A softmax takes some for each row,
        and a copy in accum_dtype of a narrow result, piece by piece."""
        if not self.forward:
            return 0
        shape = self.shape
        piece = shape.batch * tokens * shape.q_heads * shape.head_dim
        limit = max(MERGED_AT_ONCE, piece // 16)
        while piece > limit:
            piece -= piece // 2
        return ITEMSIZE[shape.accum_dtype] * (piece * narrow + 4 * (piece // shape.head_dim))

    def product(self, one: op.Product) -> None:
        if not self.forward and one.q_slot not in self.outs and (self.delta or not is_local(one.q_slot)):
            self.outs[one.q_slot] = self.rows("q", self.bound.tokens("q", one.q))
            self.note()
        for launch in self.bound.launches(one.q, one.kv):
            self.launch(one, launch)

    def rows(self, kind: str, tokens: int) -> int:
        """Bytes of so many tokens' result in the inputs' dtype."""
        fields = self.shape.fields(self.program.direction, kind, self.shape.dtype)
        named = [f for f in fields if kind != "q" or f.name == "q"]
        return self.shape.batch * tokens * token_bytes(named)

    def launch(self, one: op.Product, launch: Tile) -> None:
        """Counts a launch's results and the copies of its operands; then adds each result to the running one."""
        rows, columns = launch.q1 - launch.q0, launch.k1 - launch.k0
        sides = [
            (launch.k0, columns, launch.k_step) if unit[0] == "dkv" else (launch.q0, rows, launch.q_step)
            for unit, _ in one.results
        ]
        for (unit, slot), (first, *_) in zip(one.results, sides, strict=True):
            result = self.results.get(unit)
            if result and first < result.end:  # is widened to accum_dtype before there is more
                self.settle(result, slot)
        units = zip(one.results, sides, strict=True)
        sizes = [self.rows(unit[0], launch.groups * side[1]) for (unit, _), side in units]
        self.note(sum(sizes) + self.copied(one, launch, sizes))
        for index, ((unit, slot), (first, size, step)) in enumerate(zip(one.results, sides, strict=True)):
            if self.add(unit, slot, _Rows(first, size, step, launch.groups), sum(sizes)):
                sizes[index] = 0

    def add(self, unit: Unit, slot: int, rows: _Rows, new: int) -> bool:
        """Follows `Accumulator.add`; returns whether the new tensors stay as they are. new: bytes of all results of the
        launch."""
        result, tokens = self.results.setdefault(unit, _Result()), self.bound.tokens(*unit)
        all_rows, narrow = rows.are_all(tokens), self.shape.dtype != self.shape.accum_dtype
        adopted = not result.loose and not result.in_slot and (all_rows or rows.groups == 1)
        if adopted:
            result.loose = self.rows(unit[0], rows.size * rows.groups)
            result.all_rows, result.in_accum_dtype = all_rows, not narrow
        elif rows.first < result.end:
            self.settle(result, slot, more=new)
            self.note(new + self.merging(rows.groups * min(rows.size, rows.step or rows.size), narrow))
        elif not result.all_rows:
            size = self.rows(unit[0], tokens)
            self.note(new + size)
            result.loose, result.all_rows, result.in_accum_dtype = size, True, not narrow
        if not adopted and rows.groups > 1 and rows.step < rows.size:  # rows that groups share are added
            self.settle(result, slot, more=new)
            self.note(new + self.merging(rows.groups * rows.step, narrow))
        result.end = max(result.end, rows.end)
        return adopted

    def copied(self, one: op.Product, launch: Tile, sizes: list[int]) -> int:
        """Bytes of the copies that a launch needs. Operands are copied into reverse order, or so that the groups of
        several sequences stand side by side; results out of reverse order. The mask of a block of a band counts too.
        sizes: bytes of each result."""
        turned = launch.kind == "upper"
        sides = ((launch.q0, launch.q1, launch.q_step, "q", one.q), (launch.k0, launch.k1, launch.k_step, "kv", one.kv))
        copies = 0
        for first, last, step, kind, key in sides:
            apart = self.shape.batch > 1 and launch.groups > 1 and launch.groups * step != self.bound.tokens(kind, key)
            if turned or apart:
                tensors = 1 if self.forward or kind == "kv" else 3  # with the output and its gradient
                copies += tensors * self.rows(kind, launch.groups * (last - first))
        masked = launch.kind == "band" and self.bound.support.rows
        pairs = (launch.q1 - launch.q0) * (launch.k1 - launch.k0) if masked else 0
        return max(copies, max(sizes)) if turned else copies + pairs * ITEMSIZE[self.shape.dtype]

    def merge(self, one: op.Merge) -> None:
        result, tokens = self.results.setdefault(one.unit, _Result()), self.bound.tokens(*one.unit)
        if one.into == one.arrived:
            self.note(
                self.merging(tokens, narrow=bool(result.loose) and not result.in_accum_dtype) if result.all_rows else 0
            )
            self.results[one.unit] = _Result(all_rows=True, in_accum_dtype=True, in_slot=True, end=INF)
        else:
            self.settle(result, one.into)
            result.end = INF
            self.note(self.merging(tokens, narrow=True))

    def scatter_start(self, one: op.ScatterStart) -> None:
        reduce = one.collective
        self.settle(self.results.pop((reduce.kind, reduce.blocks)), one.accumulator, in_slot=True)
        self.make(one.accumulator, one.sent)
        part = reduce.key_of(self.program.rank)
        fields = self.shape.fields(self.program.direction, reduce.kind, self.shape.accum_dtype)
        tokens = self.shape.batch * self.bound.tokens(reduce.kind, part)
        local = tokens * token_bytes(fields)
        self.results[reduce.kind, part] = _Result(loose=local, all_rows=True, in_accum_dtype=True)
        self.make(one.received)

    def finish(self, one: op.Finish) -> None:
        """Results in the inputs' dtype, one tensor after the other; several blocks' in one tensor, made at once."""
        done = 0
        if self.program.blocks_per_rank > 1:
            done = sum(self.rows(unit[0], self.bound.tokens(*unit)) for unit, _ in one.results)
            for unit, slot in one.results:
                self.settle(self.results.setdefault(unit, _Result()), slot, more=done)
            self.note(done)
            return
        for unit, slot in one.results:
            result = self.results.setdefault(unit, _Result())
            if (result.loose and result.all_rows and not result.in_accum_dtype) or (
                result.settled and not result.in_slot and (self.shape.dtype == self.shape.accum_dtype)
            ):
                continue
            self.settle(result, slot)
            done += self.rows(unit[0], self.bound.tokens(*unit))
            self.note(done)

    # ---- heads

    def local(self, head_chunk: int, field: str) -> int:
        """Bytes of a field of local tokens and of the head chunk's heads."""
        heads, shape = self.bound.heads, self.shape
        tokens = tokens_by_ulysses_rank(self.bound.shards, SIDE.get(field, "q"), self.program.rank, heads.ulysses.size)
        of_head_chunk = heads.of_head_chunk(head_chunk, field)
        width = ITEMSIZE[shape.accum_dtype] if field in PER_ROW else shape.head_dim * shape.itemsize
        return shape.batch * tokens[heads.ulysses.rank] * (of_head_chunk.stop - of_head_chunk.start) * width

    def pack_heads(self, one: op.PackHeads) -> None:
        head_chunk, inward, fields = one.exchange
        if inward:
            self.make(one.into, more=sum(self.local(head_chunk, field) for field in fields if field in PER_ROW))
            return
        size = sum(self.head_chunk_results[field] for field in fields)
        if len(fields) > 1 or self.shape.batch > 1:
            self.make(one.into)
        else:  # what is sent is the result as it lies
            self.slots[one.into] = size
        for field in fields:
            del self.head_chunk_results[field]

    def enter(self, one: op.Enter) -> None:
        self.shape = self.bound.shapes[one.head_chunk]

    def leave(self, one: op.Leave) -> None:
        """The head chunk's results stay; its operands go, or are saved."""
        tokens = {side: tokens_of(self.bound.shards, side, self.program.rank) for side in ("q", "kv")}
        self.results.clear()
        self.outs.clear()
        for kind in ACCUMULATORS[self.program.direction]:
            for field in self.shape.fields(self.program.direction, kind, self.shape.dtype):
                rows = self.shape.batch * tokens[SIDE.get(field.name, "q")]
                self.head_chunk_results[field.name] = rows * field.elements * field.itemsize
        if self.forward:
            arrived = sum(self.slots[slot] for _, slot in self.enters[one.head_chunk])
            self.saved += self.choice.qkv * arrived
            for name in ("lse", "out") if self.choice.out else ("lse",):  # what is saved is not there twice
                self.saved, self.head_chunk_results[name] = self.saved + self.head_chunk_results[name], 0
            if "lse" not in self.sent:
                del self.head_chunk_results["lse"]
        if self.bound.heads.ulysses.size == 1:
            for name in list(self.head_chunk_results):
                self.put(one.head_chunk, name, self.head_chunk_results.pop(name))

    def unpack_heads(self, one: op.UnpackHeads) -> None:
        for field in one.exchange.fields:
            self.put(one.exchange.head_chunk, field, self.local(one.exchange.head_chunk, field))

    def put(self, head_chunk: int, field: str, size: int) -> None:
        head_chunks = len(self.bound.heads.head_chunks)
        if field not in self.local_results:
            self.local_results[field] = (
                sum(self.local(each, field) for each in range(head_chunks)) if head_chunks > 1 else size
            )
        self.note(size if head_chunks > 1 else 0)


TRACK = methods_of(_Tracker)


def fewest_head_chunks(
    recipe: Recipe, ulysses_size: int, comm_dtype: str, local: Shape, mask: Mask, shards: Shards
) -> int:
    """The fewest head chunks with which attention takes no more memory than its q, k, v and out. local: a rank's own
    tensors. All ranks look at the program of the first CP rank, so that they agree. ulysses_size: of Ulysses;
    comm_dtype: the setting of `shape_of`."""
    compiler, free = Compiler(recipe, 0), free_head_chunk_counts(local.q_heads, local.kv_heads, ulysses_size)
    for count in free:
        heads = (*largest_share(local.q_heads // count, local.kv_heads // count, ulysses_size), local.head_dim)
        shape = shape_of(comm_dtype, local.dtype, local.batch, heads)
        taken = max(peak(compiler.bound_inner(way, mask, shards, shape)) for way in ("forward", "backward"))
        per_token = 2 * sum(heads[:2]) * count * local.head_dim * local.batch * local.itemsize
        if taken <= per_token * tokens_of(shards, "q", 0):
            return count
    return free[-1]
