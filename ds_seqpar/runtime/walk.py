"""Executes a program over tensors. One walk serves every schedule, both directions, real and virtual ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..compiler.compile import BoundProgram, side_of
from ..compiler.program import instructions as op
from ..compiler.program.instructions import LOCAL, Transfer, methods_of
from ..compiler.program.ulysses import COUNTERS
from ..compiler.schedules.actions import Unit
from ..compiler.sharding.layout import Key
from ..compiler.sharding.shards import rows_in, rows_of
from .buffers import Buffers, Tensors, join_out, pack_in, unpack_out
from .call_io import Call
from .comm import Comm, Handle, Message
from .kernels.accumulate import Accumulator
from .work import ALL, Work


class Recorder(Protocol):
    def timed(self, walk: Walk) -> Callable[[], None]:
        """A function to call in place of the walk's `advance`, which records the instruction."""
        ...

    def span(self, kind: str, label: str, bytes: int = 0) -> contextlib.AbstractContextManager[None]:
        """A context that is recorded as one event."""
        ...


class Walk:
    """One rank's part of one attention call. Each method that takes an instruction, `one`, executes it.

    at: the number of the next instruction, or of the one that failed. work: of the head chunk that was entered; result:
    what it returned. tickets: transfers that were started, until they are waited for. results: accumulators of
    units. recorder: records when each instruction is executed."""

    work: Work
    result: Tensors

    def __init__(self, bound: BoundProgram, call: Call, comm: Comm, recorder: Recorder | None = None) -> None:
        self.bound, self.program, self.call, self.comm = bound, bound.program, call, comm
        self.buffers = Buffers(bound, call.device)
        self.tickets: dict[int, Handle] = {}
        self.results: dict[Unit, Accumulator] = {}
        self.at, self.recorder, self.entered = 0, recorder, False

    def run(self) -> list[Tensor]:
        """Executes all instructions, on a real rank, whose waits block. Returns the call's results."""
        advance, count = (
            self.advance if self.recorder is None else self.recorder.timed(self),
            len(self.program.code),
        )
        while self.at < count:
            advance()
        return self.call.results()

    def advance(self) -> None:
        program, at = self.program, self.at
        instruction = program.code[at]
        EXECUTE[type(instruction)](self, instruction)
        if program.frees[at]:
            self.free(program.frees[at])
        self.at = at + 1

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.buffers.free(slot)
            if self.entered:
                self.work.forget(slot)

    # ---- heads

    def pack_heads(self, one: op.PackHeads) -> None:
        exchange = one.exchange
        if exchange.inward:
            parts = [self.call.part(exchange.head_chunk, field) for field in exchange.fields]
            message = self.buffers.elements(one.into, self.bound.exchange_sizes(exchange).dtype)
            pack_in(parts, self.call.heads.shares(exchange), message)
        else:
            joined = join_out([self.call.pop_result(field) for field in exchange.fields])
            self.buffers.adopt(one.into, joined.contiguous())

    def exchange_start(self, one: op.ExchangeStart) -> None:
        sizes, kind = self.bound.exchange_sizes(one.exchange), COUNTERS[one.exchange.fields[0]]
        sent, received = (self.buffers.elements(slot, sizes.dtype) for slot in (one.sent, one.received))
        self.tickets[one.ticket] = self.comm.exchange(kind, sent, received, (sizes.outgoing, sizes.incoming))

    def enter(self, one: op.Enter) -> None:
        for exchange, slot in one.arrived:
            sizes = self.bound.exchange_sizes(exchange)
            heads = sum(self.call.heads.inner_counts(exchange))
            shape = sum(sizes.tokens), self.bound.shape.batch, heads, sizes.width
            self.call.arrive(exchange, self.buffers.elements(slot, sizes.dtype).view(shape))
        self.work, self.entered = self.call.enter(one.head_chunk), True

    def leave(self, one: op.Leave) -> None:
        self.call.leave(one.head_chunk, self.result)
        del self.work, self.result
        self.entered = False

    def unpack_heads(self, one: op.UnpackHeads) -> None:
        exchange, sizes = one.exchange, self.bound.exchange_sizes(one.exchange)
        received = self.buffers.elements(one.received, sizes.dtype)
        tokens = sizes.tokens[self.call.heads.ulysses.rank]
        results = unpack_out(received, self.call.heads.shares(exchange), self.bound.shape.batch, tokens, sizes.width)
        for field, x in zip(exchange.fields, results, strict=True):
            self.call.put_result(exchange.head_chunk, field, x)

    def operand(self, unit: Unit, slot: int) -> Tensors:
        return self.local(unit) if slot <= LOCAL else self.buffers.tensors(slot, unit)

    def local(self, unit: Unit, travels: bool = False) -> Tensors:
        rows = ALL if self.program.blocks_per_rank == 1 else self.local_rows(*unit)
        return self.work.local(unit[0], rows, travels)

    def local_rows(self, kind: str, key: Key) -> slice:
        """The rows of this rank's tensors that a local block has."""
        return rows_in(self.bound.shards, side_of(kind), key[0])

    def pack(self, one: op.Pack) -> None:
        local = self.local(one.unit, travels=True)
        for target, tensor in zip(self.buffers.tensors(one.into, one.unit), local, strict=True):
            target.copy_(tensor)

    def post(self, one: op.Post) -> None:
        for transfer in one.receives:
            self.work.forget(transfer.slot)
        sends, receives = [self.message(t) for t in one.sends], [self.message(t) for t in one.receives]
        self.tickets[one.ticket] = self.comm.post(sends, receives)

    def message(self, transfer: Transfer) -> Message:
        peer, (kind, key), slot, tag = transfer
        elements, size = self.bound.unit_size(slot, kind, key)
        return Message(peer, kind, elements, self.buffers.raw(slot, size), tag)

    def wait(self, one: op.Wait) -> None:
        self.tickets[one.ticket].wait()
        del self.tickets[one.ticket]

    def gather_start(self, one: op.GatherStart) -> None:
        gather, kind = one.collective, one.collective.kind
        unit = kind, gather.key_of(self.program.rank)
        elements, size = self.bound.unit_size(one.sent, *unit)
        sent = Message(0, kind, elements, self.buffers.raw(one.sent, size), 0)
        received = self.buffers.raw(one.received, sent.buffer.numel() * len(gather.ranks))
        self.tickets[one.ticket] = self.comm.all_gather(gather.ranks, sent, received)

    def assemble(self, one: op.Assemble) -> None:
        gather = one.collective
        self.work.forget(one.into)
        whole = self.buffers.tensors(one.into, (gather.kind, gather.blocks))
        keys = [gather.key_of(rank) for rank in self.comm.order(gather.ranks)]
        for key, part in zip(keys, self.buffers.parts(one.received, gather.kind, keys), strict=True):
            for target, tensor in zip(whole, part, strict=True):
                for rows, piece in _rows_and_pieces(target, tensor, self.rows(gather.kind, gather.blocks, key)):
                    rows.copy_(piece)

    def product(self, one: op.Product) -> None:
        launches = self.bound.launches(one.q, one.kv)
        q, kv = self.operand(("q", one.q), one.q_slot), self.operand(("kv", one.kv), one.kv_slot)
        self.work.product(q, kv, one.q_slot, launches, [self.accumulator(unit, slot) for unit, slot in one.results])

    def accumulator(self, unit: Unit, slot: int) -> Accumulator:
        """The accumulator of a unit, which goes into the slot once it must be in accum_dtype."""
        if unit not in self.results:
            buffers = self.buffers
            self.results[unit] = self.work.accumulator(unit[0], lambda: buffers.tensors(slot, unit))
        return self.results[unit]

    def merge(self, one: op.Merge) -> None:
        arrived, accumulator = self.buffers.tensors(one.arrived, one.unit), self.accumulator(one.unit, one.into)
        if one.into == one.arrived:
            accumulator.add_(*arrived)
        else:
            accumulator.merge(*arrived)

    def export(self, one: op.Export) -> None:
        accumulator = self.accumulator(one.unit, one.accumulator)
        del self.results[one.unit]
        if one.into == one.accumulator:
            accumulator.materialize()
        else:
            accumulator.copy_into(self.buffers.tensors(one.into, one.unit))

    def scatter_start(self, one: op.ScatterStart) -> None:
        """An all-to-all of partial results, which are merged where they arrive: the bytes of a reduce-scatter, with a
        reduction of ours. The local part does not travel, so it is not rounded to the dtype that travels."""
        reduce, kind, rank = one.collective, one.collective.kind, self.program.rank
        whole, local = self.results.pop((kind, reduce.blocks)).materialize(), reduce.key_of(rank)
        order = [reduce.key_of(peer) for peer in self.comm.order(reduce.ranks)]
        others = [key for key in order if key != local]
        for key, part in zip(others, self.buffers.parts(one.sent, kind, others), strict=True):
            for target, tensor in zip(part, whole, strict=True):
                for rows, piece in _rows_and_pieces(tensor, target, self.rows(kind, reduce.blocks, key)):
                    piece.copy_(rows)
        local_rows = self.rows(kind, reduce.blocks, local)
        self.accumulator((kind, local), one.local_part).add_(
            *(torch.cat([x[:, rows] for rows in local_rows], 1) for x in whole)
        )
        outgoing = [0 if key == local else self.bound.unit_bytes(one.sent, kind, key) for key in order]
        incoming = [0 if key == local else self.bound.unit_bytes(one.received, kind, local) for key in order]
        self.tickets[one.ticket] = self.comm.all_to_all(
            reduce.ranks,
            kind,
            self.bound.unit_size(one.received, kind, local)[0] * len(others),
            self.buffers.raw(one.sent, sum(outgoing)),
            self.buffers.raw(one.received, sum(incoming)),
            (outgoing, incoming),
        )

    def fold(self, one: op.Fold) -> None:
        kind, key = one.unit
        accumulator = self.accumulator(one.unit, one.accumulator)
        for part in self.buffers.parts(one.received, kind, [key] * one.parts):
            accumulator.merge(*part)

    def finish(self, one: op.Finish) -> None:
        if self.program.blocks_per_rank == 1:
            self.result = self.work.finish([self.accumulator(unit, slot) for unit, slot in one.results])
        else:
            whole = self.work.empty_results()
            for unit, slot in one.results:
                rows = self.local_rows(*unit)
                self.accumulator(unit, slot).copy_into(tuple(x[:, rows] for x in whole[unit[0]]))
            self.result = tuple(itertools.chain.from_iterable(whole.values()))
        self.results.clear()

    def rows(self, kind: str, whole: Key, part: Key) -> tuple[slice, ...]:
        """The rows of a whole block that a part has."""
        return rows_of(self.bound.shards, side_of(kind), whole, part)


EXECUTE = methods_of(Walk)


def _rows_and_pieces(whole: Tensor, part: Tensor, rows: tuple[slice, ...]) -> list[tuple[Tensor, Tensor]]:
    """Views of those rows of the whole (B, n, ...), each with the piece of the part (B, m, ...) that belongs there."""
    pieces = part.split([row.stop - row.start for row in rows], dim=1)
    return [(whole[:, row], piece) for row, piece in zip(rows, pieces, strict=True)]
