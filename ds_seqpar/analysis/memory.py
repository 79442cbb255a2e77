"""Compute the memory that an attention call needs for slots, accumulators and kernel results, besides its inputs.

A tracker steps through the program without tensors, and counts the bytes that the executor would allocate and free. A
kernel's temporary allocations are included if their formula is known (see `workspace`).
"""

from __future__ import annotations

import dataclasses
import functools

from ..core.compiler.compile import BoundProgram, Compiler, Recipe
from ..core.compiler.program import instructions as op
from ..core.compiler.program.instructions import is_local, methods_of
from ..core.compiler.program.shape import ITEMSIZE, Shape, token_bytes
from ..core.compiler.program.ulysses import SavedForBackward
from ..core.compiler.schedules.actions import ACCUMULATORS, Unit
from ..core.compiler.sharding.heads import largest_share, max_head_chunks
from ..core.compiler.sharding.masks import Mask
from ..core.compiler.sharding.shards import Shards, tokens_by_ulysses_rank, tokens_of
from ..core.compiler.tiles.launches import PLAIN_KERNEL
from ..core.compiler.tiles.tiles import MERGED_AT_ONCE, Rows, Tile
from .workspace import WORKSPACES, LaunchSize

INF = float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Numbers of bytes needed in addition to a rank's local q, k, v and the gradient of out."""

    forward: int  # peak in forward, including out
    saved: int  # saved by forward for backward, including out
    backward: int  # peak in backward, including saved tensors and dq, dk, dv
    inputs: bool  # whether backward also needs the rank's own q, k and v


def figures(forward: BoundProgram, backward: BoundProgram, choice: SavedForBackward) -> Figures:
    """Return the figures of a call, computed from its forward and backward programs.

    `choice` determines which tensors forward saves for backward.
    """
    tracker = _Tracker(forward, choice)
    peak_forward, saved = tracker.run(), tracker.saved_with_results()
    peak_backward = saved + _Tracker(backward).run()
    return Figures(forward=peak_forward, saved=saved, backward=peak_backward, inputs=not choice.qkv)


@functools.lru_cache(maxsize=8)  # equal head chunks share an entry
def peak(bound: BoundProgram) -> int:
    """Return the peak memory in bytes while the program runs, including its results."""
    return _Tracker(bound).run()


@dataclasses.dataclass
class _Result:
    """The state of an accumulator."""

    loose: int = 0  # bytes outside slots
    all_rows: bool = False  # whether all rows are present
    in_accum_dtype: bool = False
    in_slot: bool = False  # whether the result is in the slot to send from
    end: float = 0  # rows from this index on are empty

    @property
    def settled(self) -> bool:
        return self.all_rows and self.in_accum_dtype


class _Tracker:
    """Tracks the bytes of all live tensors while a program runs."""

    def __init__(self, bound: BoundProgram, choice: SavedForBackward = SavedForBackward.NOTHING) -> None:
        self.bound, self.choice, self.shape, self.program = bound, choice, bound.shape, bound.program
        self.forward = bound.program.direction == "forward"
        self.enters = {
            instruction.head_chunk: instruction.arrived
            for instruction in bound.program.code
            if isinstance(instruction, op.Enter)
        }
        self.delta = any("delta" in exchange.fields for arrived in self.enters.values() for exchange, _ in arrived)
        self.slots: dict[int, int] = {}  # bytes by allocated slot
        self.outs: dict[int, int] = {}  # bytes of the recomputed out, by slot of queries
        self.results: dict[Unit, _Result] = {}
        self.head_chunk_results: dict[str, int] = {}  # bytes by field, for the last completed head chunk
        self.local_results: dict[str, int] = {}  # bytes by field, for results of local tokens
        self.saved = self.peak = 0  # bytes saved by forward; current peak
        self.computed = 0  # temporary bytes of an operator during a product
        packed = (instruction.exchange for instruction in bound.program.code if isinstance(instruction, op.PackHeads))
        self.sent = {field for exchange in packed for field in exchange.fields}

    def run(self) -> int:
        for instruction, frees in zip(self.program.code, self.program.frees, strict=True):
            TRACK[type(instruction)](self, instruction)
            for slot in frees:
                self.slots.pop(slot, None)
                self.outs.pop(slot, None)
        return self.peak

    def saved_with_results(self) -> int:
        """Return the bytes used after forward by results and by tensors saved for backward."""
        return self.saved + sum(self.local_results.values())

    def note(self, extra: int = 0) -> None:
        """Update the peak with the current bytes plus `extra` bytes that are needed only temporarily."""
        loose = sum(result.loose for result in self.results.values())
        held = sum(
            sum(bytes_of.values()) for bytes_of in (self.slots, self.outs, self.head_chunk_results, self.local_results)
        )
        self.peak = max(self.peak, held + self.saved + loose + self.computed + extra)

    def make(self, *slots: int, extra: int = 0) -> None:
        for slot in slots:
            self.slots.setdefault(slot, self.bound.slot_bytes(slot))
        self.note(extra)

    def pack(self, instruction: op.Pack) -> None:
        self.make(instruction.into)

    def post(self, instruction: op.Post) -> None:
        for transfer in instruction.receives:
            self.outs.pop(transfer.slot, None)
        self.make(*(transfer.slot for transfer in instruction.receives))

    def wait(self, instruction: op.Wait) -> None:
        """Leave the byte count unchanged."""

    def gather_start(self, instruction: op.GatherStart | op.ExchangeStart) -> None:
        self.make(instruction.received)

    exchange_start = gather_start

    def assemble(self, instruction: op.Assemble) -> None:
        self.outs.pop(instruction.into, None)
        self.make(instruction.into)

    def export(self, instruction: op.Export) -> None:
        result = self.results.pop(instruction.unit, _Result())
        self.settle(
            result, instruction.accumulator, in_slot=instruction.into == instruction.accumulator, extra=result.loose
        )
        self.make(instruction.into)

    def fold(self, instruction: op.Fold) -> None:
        self.note(
            self.merging(self.bound.tokens(*instruction.unit), narrow=self.shape.comm_dtype != self.shape.accum_dtype)
        )

    def settle(self, result: _Result, slot: int, in_slot: bool = False, extra: int = 0) -> None:
        """Expand a result to all rows in accum_dtype, and move the result to its slot.

        With `in_slot`, the result is moved even if it already has all rows in accum_dtype.
        """
        if result.settled and (result.in_slot or not in_slot):
            return
        self.make(slot, extra=extra)
        result.loose, result.all_rows, result.in_accum_dtype, result.in_slot = 0, True, True, True

    def merging(self, tokens: int, narrow: bool) -> int:
        """Return the temporary bytes needed to merge one result into another.

        Sums need no temporary memory. On CPUs, a softmax needs some bytes per row, and copies a result with a narrower
        dtype to accum_dtype piece by piece. On GPUs, Triton's kernel needs no memory. Without Triton, torch's
        operations need four numbers per row, for at most `accumulate.AT_ONCE` elements at a time, which is 8 MiB in
        fp32 with a head_dim of 128.
        """
        if not self.forward:
            return 0
        shape = self.shape
        piece = shape.batch * tokens * shape.q_heads * shape.head_dim
        limit = max(MERGED_AT_ONCE, piece // 16)
        while piece > limit:
            piece -= piece // 2
        return ITEMSIZE[shape.accum_dtype] * (piece * narrow + 4 * (piece // shape.head_dim))

    def product(self, instruction: op.Product) -> None:
        if (
            not self.forward
            and instruction.q_slot not in self.outs
            and (self.delta or not is_local(instruction.q_slot))
        ):
            self.outs[instruction.q_slot] = self.rows("q", self.bound.tokens("q", instruction.q))
            self.note()
        launches = self.bound.launches(instruction.q, instruction.kv)
        keys = max((launch.sides[1].end for launch in launches), default=0)
        self.computed = self.shape.product_bytes(self.program.direction, keys) if launches else 0
        if self.computed:
            self.note()
        for launch in launches:
            self.launch(instruction, launch)
        self.computed = 0

    def rows(self, kind: str, tokens: int) -> int:
        """Return the size in bytes of a result with the given number of tokens, in the dtype of the inputs."""
        fields = self.shape.fields(self.program.direction, kind, self.shape.dtype)
        counted = [f for f in fields if kind != "q" or f.name == "q"]
        return self.shape.batch * tokens * token_bytes(counted)

    def launch(self, instruction: op.Product, launch: Tile) -> None:
        """Count a launch's results and the copies of its operands, then add each result to its accumulator."""
        rows, columns = launch.sides
        sides = [columns if unit[0] == "dkv" else rows for unit, _ in instruction.results]
        for (unit, slot), side in zip(instruction.results, sides, strict=True):
            result = self.results.get(unit)
            if result and side.start < result.end:  # converted before the launch allocates its results
                self.settle(result, slot)
        units = zip(instruction.results, sides, strict=True)
        sizes = [self.rows(unit[0], side.groups * side.size) for (unit, _), side in units]
        self.note(sum(sizes) + self.copied(instruction, launch, sizes) + self.workspace(launch))
        for index, ((unit, slot), side) in enumerate(zip(instruction.results, sides, strict=True)):
            if self.add(unit, slot, side, sum(sizes)):
                sizes[index] = 0

    def workspace(self, launch: Tile) -> int:
        """Return the bytes that the kernel allocates internally during a launch."""
        formula, shape, (rows, columns) = WORKSPACES.get(self.bound.support.workspace), self.shape, launch.sides
        if formula is None:
            return 0
        heads = shape.q_heads, shape.kernel_kv_heads, shape.head_dim
        return formula(
            LaunchSize(shape.batch * rows.groups, rows.size, columns.size, *heads, shape.itemsize, self.forward)
        )

    def add(self, unit: Unit, slot: int, rows: Rows, new: int) -> bool:
        """Track `Accumulator.add`, and return whether the new tensors become the accumulator without a copy.

        `new` is the total size in bytes of the launch's results.
        """
        result, tokens = self.results.setdefault(unit, _Result()), self.bound.tokens(*unit)
        all_rows, narrow = rows.all_of(tokens), self.shape.dtype != self.shape.accum_dtype
        adopted = not result.loose and not result.in_slot and (all_rows or rows.groups == 1)
        if adopted:
            result.loose = self.rows(unit[0], rows.size * rows.groups)
            result.all_rows, result.in_accum_dtype = all_rows, not narrow
        elif rows.start < result.end:
            self.settle(result, slot, extra=new)
            self.note(new + self.merging(rows.groups * min(rows.size, rows.step or rows.size), narrow))
        elif not result.all_rows:
            size = self.rows(unit[0], tokens)
            self.note(new + size)
            result.loose, result.all_rows, result.in_accum_dtype = size, True, not narrow
        # groups overlap, so rows that they share are summed
        if not adopted and rows.groups > 1 and rows.step < rows.size:
            self.settle(result, slot, extra=new)
            self.note(new + self.merging(rows.groups * rows.step, narrow))
        result.end = max(result.end, rows.end)
        return adopted

    def copied(self, instruction: op.Product, launch: Tile, sizes: list[int]) -> int:
        """Return the size in bytes of the copies that a launch needs.

        Operands are copied to reverse their order, or to make the groups of several sequences contiguous. Results are
        copied to restore the order. The mask of a banded block is included. `sizes` lists the size of each result in
        bytes.
        """
        turned = launch.kind == "upper"
        sides = (
            (launch.q0, launch.q1, launch.q_step, "q", instruction.q),
            (launch.k0, launch.k1, launch.k_step, "kv", instruction.kv),
        )
        copies = 0
        for first, last, step, kind, key in sides:
            apart = self.shape.batch > 1 and launch.groups > 1 and launch.groups * step != self.bound.tokens(kind, key)
            if turned or apart:
                tensors = 1 if self.forward or kind == "kv" else 3  # operands include the output and its gradient
                copies += tensors * self.rows(kind, launch.groups * (last - first))
        masked = launch.kind == "band" and self.bound.support.rows
        pairs = (launch.q1 - launch.q0) * (launch.k1 - launch.k0) if masked else 0
        return max(copies, max(sizes)) if turned else copies + pairs * ITEMSIZE[self.shape.dtype]

    def merge(self, instruction: op.Merge) -> None:
        result, tokens = self.results.setdefault(instruction.unit, _Result()), self.bound.tokens(*instruction.unit)
        if instruction.into == instruction.arrived:
            self.note(
                self.merging(tokens, narrow=bool(result.loose) and not result.in_accum_dtype) if result.all_rows else 0
            )
            self.results[instruction.unit] = _Result(all_rows=True, in_accum_dtype=True, in_slot=True, end=INF)
        else:
            self.settle(result, instruction.into)
            result.end = INF
            self.note(self.merging(tokens, narrow=True))

    def scatter_start(self, instruction: op.ScatterStart) -> None:
        reduce = instruction.collective
        self.settle(self.results.pop((reduce.kind, reduce.blocks)), instruction.accumulator)
        self.make(instruction.accumulator, instruction.local_part, instruction.sent)
        key = reduce.key_of(self.program.rank)
        self.results[reduce.kind, key] = _Result(all_rows=True, in_accum_dtype=True, in_slot=True, end=INF)
        self.make(instruction.received)

    def finish(self, instruction: op.Finish) -> None:
        """Count results in the dtype of the inputs.

        Results are allocated one after another, or all at once if a rank owns several blocks.
        """
        finished = 0
        if self.program.blocks_per_rank > 1:
            finished = sum(self.rows(unit[0], self.bound.tokens(*unit)) for unit, _ in instruction.results)
            for unit, slot in instruction.results:
                self.settle(self.results.setdefault(unit, _Result()), slot, extra=finished)
            self.note(finished)
            return
        for unit, slot in instruction.results:
            result = self.results.setdefault(unit, _Result())
            if (result.loose and result.all_rows and not result.in_accum_dtype) or (
                result.settled and not result.in_slot and (self.shape.dtype == self.shape.accum_dtype)
            ):
                continue
            self.settle(result, slot)
            finished += self.rows(unit[0], self.bound.tokens(*unit))
            self.note(finished)

    # ---- heads

    def local(self, head_chunk: int, name: str) -> int:
        """Return a field's size in bytes for the local tokens and the heads of one head chunk."""
        heads, field = self.bound.heads, self.shape.field(name)
        tokens = tokens_by_ulysses_rank(self.bound.shards, field.side, self.program.rank, heads.ulysses.size)
        of_head_chunk = heads.of_head_chunk(head_chunk, field.side)
        width = (of_head_chunk.stop - of_head_chunk.start) * max(1, field.width) * field.itemsize
        return self.shape.batch * tokens[heads.ulysses.rank] * width

    def pack_heads(self, instruction: op.PackHeads) -> None:
        head_chunk, inward, fields = instruction.exchange
        if inward:
            rows = (self.local(head_chunk, name) for name in fields if not self.shape.field(name).width)
            self.make(instruction.into, extra=sum(rows))
            return
        size = sum(self.head_chunk_results[field] for field in fields)
        if len(fields) > 1 or self.shape.batch > 1:
            self.make(instruction.into)
        else:  # the result is sent without a copy
            self.slots[instruction.into] = size
        for field in fields:
            del self.head_chunk_results[field]

    def enter(self, instruction: op.Enter) -> None:
        self.shape = self.bound.shapes[instruction.head_chunk]

    def leave(self, instruction: op.Leave) -> None:
        """Count a head chunk's results, and free or save the chunk's operands."""
        tokens = {side: tokens_of(self.bound.shards, side, self.program.rank) for side in ("q", "kv")}
        self.results.clear()
        self.outs.clear()
        for kind in ACCUMULATORS[self.program.direction]:
            for field in self.shape.fields(self.program.direction, kind, self.shape.dtype):
                rows = self.shape.batch * tokens[field.side]
                self.head_chunk_results[field.name] = rows * field.elements * field.itemsize
        if self.forward:
            arrived = sum(self.slots[slot] for _, slot in self.enters[instruction.head_chunk])
            self.saved += self.choice.qkv * arrived
            saved = ("lse", "out") if self.choice.out else ("lse",)
            for name in self.head_chunk_results.keys() & saved:  # saved tensors are not counted twice
                self.saved, self.head_chunk_results[name] = self.saved + self.head_chunk_results[name], 0
            if "lse" not in self.sent:
                self.head_chunk_results.pop("lse", None)
        if self.bound.heads.ulysses.size == 1:
            for name in list(self.head_chunk_results):
                self.put(instruction.head_chunk, name, self.head_chunk_results.pop(name))

    def unpack_heads(self, instruction: op.UnpackHeads) -> None:
        for field in instruction.exchange.fields:
            self.put(instruction.exchange.head_chunk, field, self.local(instruction.exchange.head_chunk, field))

    def put(self, head_chunk: int, field: str, size: int) -> None:
        head_chunks = len(self.bound.heads.head_chunks)
        if field not in self.local_results:
            self.local_results[field] = (
                sum(self.local(index, field) for index in range(head_chunks)) if head_chunks > 1 else size
            )
        self.note(size if head_chunks > 1 else 0)


TRACK = methods_of(_Tracker)


def free_head_chunk_counts(q_heads: int, kv_heads: int, ulysses_size: int) -> list[int]:
    """Return, in ascending order, the numbers of equal head chunks that send no more bytes than a single chunk."""
    limit = max_head_chunks(q_heads, kv_heads, ulysses_size)
    return [1, *(n for n in range(2, limit + 1) if kv_heads % n == 0 and kv_heads // n % ulysses_size == 0)]


def fewest_head_chunks(
    recipe: Recipe, ulysses_size: int, local: Shape, mask: Mask, shards: Shards, workspace: str = ""
) -> int:
    """Return the smallest number of head chunks with which attention needs no more memory than q, k, v and out.

    All ranks use the first CP rank's program, so that all ranks return the same number.

    Args:
        local: The shape of this rank's local tensors.
        workspace: See `KernelSupport`.
    """
    support = PLAIN_KERNEL._replace(workspace=workspace)
    compiler, free = Compiler(recipe, 0), free_head_chunk_counts(local.q_heads, local.kv_heads, ulysses_size)
    for count in free:
        q_heads, kv_heads = largest_share(local.q_heads // count, local.kv_heads // count, ulysses_size)
        shape = dataclasses.replace(local, q_heads=q_heads, kv_heads=kv_heads)
        peak_bytes = max(
            peak(compiler.bound_inner(direction, mask, shards, shape, support)) for direction in ("forward", "backward")
        )
        bytes_per_token = 2 * (q_heads + kv_heads) * count * local.head_dim * local.batch * local.itemsize
        if peak_bytes <= bytes_per_token * tokens_of(shards, "q", 0):
            return count
    return free[-1]
