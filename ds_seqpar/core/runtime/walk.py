"""Execution of a program on tensors, for every schedule, both directions, and real and virtual ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.errors import CommunicationError
from ..compiler.compile import BoundProgram, side_of
from ..compiler.program import instructions as op
from ..compiler.program.instructions import LOCAL, Transfer, methods_of
from ..compiler.schedules.actions import Unit
from ..compiler.sharding.layout import Key
from ..compiler.sharding.shards import rows_in, rows_of
from .buffers import Buffers, Tensors, join_out, pack_in, unpack_out
from .call import Call
from .dense import ALL, Forward
from .kernels.accumulate import Accumulator
from .transport import Comm, Handle, Message


class Observer:
    """An object that is notified of program executions as long as it is in `Runtime.observers`."""

    def begin(self, walk: Walk) -> bool:
        """Return whether to notify this observer about the rest of a real rank's execution."""
        return True

    def before(self, walk: Walk, instruction: op.Instruction) -> None:
        """Called before an instruction is executed."""

    def after(self, walk: Walk, instruction: op.Instruction) -> None:
        """Called after an instruction is executed, and before slots are freed."""

    def end(self, walk: Walk, results: list[Tensor] | None) -> None:
        """Called at the end of an execution with the call's results, or with None after an error."""

    def sent(self, device: torch.device, program: op.Program, batches: list[Any], comm: Comm) -> None:
        """Called after messages were queued on a device outside the execution of a program.

        Args:
            program: Description of the messages.
            batches: For each wait in the program, the Work objects for the awaited messages, or None.
        """


class Walk:
    """The execution of one attention call on one rank, with one method per instruction type.

    Attributes:
        at: Index of the next instruction, or of the failed instruction.
        tickets: Pending transfers, by ticket.
        results: Accumulator of each unit.
        entered: Whether execution is inside a head chunk.
    """

    work: Forward  # of the current head chunk
    result: Tensors  # of the current head chunk, until `leave`

    def __init__(self, bound: BoundProgram, call: Call, comm: Comm, observers: Iterable[Observer] = ()) -> None:
        self.observers = list(observers)
        self.bound, self.program, self.call, self.comm = bound, bound.program, call, comm
        self.buffers = Buffers(bound, call.device)
        self.tickets: dict[int, Handle] = {}
        self.results: dict[Unit, Accumulator] = {}
        self.at, self.entered = 0, False

    def run(self) -> list[Tensor]:
        """Execute all instructions, and return the call's results.

        Only real ranks can call this method, because waits block. Errors report their location in the program: the
        step, the steps before and after it, and the ranks involved.
        """
        device_type, count = self.call.device.type, len(self.program.code)
        self.observers = [x for x in self.observers if x.begin(self)]
        autocast, results = torch.is_autocast_enabled(device_type), None
        try:
            # disable autocast, since dtypes are already chosen and sums must stay in fp32
            with torch.autocast(device_type, enabled=False) if autocast else contextlib.nullcontext():
                while self.at < count:
                    self.advance()
                results = self.call.results()
                return results
        except Exception as error:
            place = self.program.where(min(self.at, count - 1))  # the error may occur after the last instruction
            if isinstance(error, CommunicationError):
                raise CommunicationError(f"CP rank {self.program.rank}, {error}\n{place}") from error
            error.add_note(place)
            raise
        finally:
            for observer in self.observers:
                observer.end(self, results)

    def advance(self) -> None:
        program, at = self.program, self.at
        instruction = program.code[at]
        for observer in self.observers:
            observer.before(self, instruction)
        EXECUTE[type(instruction)](self, instruction)
        for observer in self.observers:
            observer.after(self, instruction)
        if program.frees[at]:
            self.free(program.frees[at])
        self.at = at + 1

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.buffers.free(slot)
            if self.entered:
                self.work.forget(slot)

    # ---- heads

    def pack_heads(self, instruction: op.PackHeads) -> None:
        exchange = instruction.exchange
        if exchange.inward:
            tensors = [self.call.part(exchange.head_chunk, field) for field in exchange.fields]
            sizes = self.bound.exchange_sizes(exchange)
            pack_in(tensors, sizes.layout, self.buffers.elements(instruction.into, sizes.dtype))
        else:
            joined = join_out([self.call.pop_result(field) for field in exchange.fields])
            self.buffers.adopt(instruction.into, joined.contiguous())

    def exchange_start(self, instruction: op.ExchangeStart) -> None:
        sizes, kind = self.bound.exchange_sizes(instruction.exchange), instruction.exchange.kind
        sent, received = (self.buffers.elements(slot, sizes.dtype) for slot in (instruction.sent, instruction.received))
        self.tickets[instruction.ticket] = self.comm.exchange(kind, sent, received, (sizes.outgoing, sizes.incoming))

    def enter(self, instruction: op.Enter) -> None:
        for exchange, slot in instruction.arrived:
            sizes = self.bound.exchange_sizes(exchange)
            self.call.arrive(exchange, self.buffers.elements(slot, sizes.dtype))
        self.work, self.entered = self.call.enter(instruction.head_chunk), True

    def leave(self, instruction: op.Leave) -> None:
        self.call.leave(instruction.head_chunk, self.result)
        del self.work, self.result
        self.entered = False

    def unpack_heads(self, instruction: op.UnpackHeads) -> None:
        exchange, sizes = instruction.exchange, self.bound.exchange_sizes(instruction.exchange)
        results = unpack_out(self.buffers.elements(instruction.received, sizes.dtype), sizes.layout)
        for field, x in zip(exchange.fields, results, strict=True):
            self.call.put_result(exchange.head_chunk, field, x)

    def operand(self, unit: Unit, slot: int) -> Tensors:
        return self.local(unit) if slot <= LOCAL else self.buffers.tensors(slot, unit)

    def local(self, unit: Unit, for_message: bool = False) -> Tensors:
        rows = ALL if self.program.blocks_per_rank == 1 else self.local_rows(*unit)
        return self.work.local(unit[0], rows, for_message)

    def local_rows(self, kind: str, key: Key) -> slice:
        """Return the rows of a local block in this rank's tensors."""
        return rows_in(self.bound.shards, side_of(kind), key[0])

    def pack(self, instruction: op.Pack) -> None:
        local = self.local(instruction.unit, for_message=True)
        for target, tensor in zip(self.buffers.tensors(instruction.into, instruction.unit), local, strict=True):
            target.copy_(tensor)

    def post(self, instruction: op.Post) -> None:
        for transfer in instruction.receives:
            self.work.forget(transfer.slot)
        sends, receives = [self.message(t) for t in instruction.sends], [self.message(t) for t in instruction.receives]
        self.tickets[instruction.ticket] = self.comm.post(sends, receives)

    def message(self, transfer: Transfer) -> Message:
        peer, (kind, key), slot, tag = transfer
        elements, size = self.bound.unit_size(slot, kind, key)
        return Message(peer, kind, elements, self.buffers.raw(slot, size), tag)

    def wait(self, instruction: op.Wait) -> None:
        self.tickets[instruction.ticket].wait()
        del self.tickets[instruction.ticket]

    def gather_start(self, instruction: op.GatherStart) -> None:
        gather, kind = instruction.collective, instruction.collective.kind
        elements, size = self.bound.unit_size(instruction.sent, kind, gather.key_of(self.program.rank))
        sent = self.buffers.raw(instruction.sent, size)
        received = self.buffers.raw(instruction.received, size * len(gather.ranks))
        others = elements * (len(gather.ranks) - 1)
        self.tickets[instruction.ticket] = self.comm.all_gather(gather.ranks, kind, others, sent, received)

    def assemble(self, instruction: op.Assemble) -> None:
        gather, kind, blocks = instruction.collective, instruction.collective.kind, instruction.collective.blocks
        self.work.forget(instruction.into)
        whole = self.buffers.tensors(instruction.into, (kind, blocks))
        keys = [gather.key_of(rank) for rank in self.comm.order(gather.ranks)]
        for key, tensors in zip(keys, self.buffers.parts(instruction.received, kind, keys), strict=True):
            for target, tensor in zip(whole, tensors, strict=True):
                for rows, piece in _rows_and_pieces(target, tensor, self.rows(kind, blocks, key)):
                    rows.copy_(piece)

    def product(self, instruction: op.Product) -> None:
        launches = self.bound.launches(instruction.q, instruction.kv)
        q = self.operand(("q", instruction.q), instruction.q_slot)
        kv = self.operand(("kv", instruction.kv), instruction.kv_slot)
        results = [self.accumulator(unit, slot) for unit, slot in instruction.results]
        self.work.product(q, kv, instruction.q_slot, launches, results)

    def accumulator(self, unit: Unit, slot: int) -> Accumulator:
        """Return a unit's accumulator. If the accumulator must be in accum_dtype, it uses the slot's memory."""
        if unit not in self.results:
            buffers = self.buffers
            self.results[unit] = self.work.accumulator(unit[0], lambda: buffers.tensors(slot, unit))
        return self.results[unit]

    def merge(self, instruction: op.Merge) -> None:
        arrived = self.buffers.tensors(instruction.arrived, instruction.unit)
        accumulator = self.accumulator(instruction.unit, instruction.into)
        if instruction.into == instruction.arrived:
            accumulator.add_(*arrived)
        else:
            accumulator.merge(*arrived)

    def export(self, instruction: op.Export) -> None:
        accumulator = self.accumulator(instruction.unit, instruction.accumulator)
        del self.results[instruction.unit]
        if instruction.into == instruction.accumulator:
            accumulator.materialize()
        else:
            accumulator.copy_into(self.buffers.tensors(instruction.into, instruction.unit))

    def scatter_start(self, instruction: op.ScatterStart) -> None:
        """Start an all-to-all of partial results, which the receivers merge.

        The all-to-all transfers as many bytes as a reduce-scatter, but allows receivers to use our own reduction. The
        local partial result is not sent, so it is not rounded to comm_dtype.
        """
        reduce, kind, rank = instruction.collective, instruction.collective.kind, self.program.rank
        blocks, local_key = reduce.blocks, reduce.key_of(rank)
        whole = self.results.pop((kind, blocks)).settled()
        keys = [reduce.key_of(peer) for peer in self.comm.order(reduce.ranks)]
        other_keys = [key for key in keys if key != local_key]
        local = self.buffers.tensors(instruction.local_part, (kind, local_key))
        parts = self.buffers.parts(instruction.sent, kind, other_keys)
        for key, tensors in zip([local_key, *other_keys], [local, *parts], strict=True):
            for target, tensor in zip(tensors, whole, strict=True):
                for rows, piece in _rows_and_pieces(tensor, target, self.rows(kind, blocks, key)):
                    piece.copy_(rows)
        self.accumulator((kind, local_key), instruction.local_part).add_(*local)
        outgoing = [0 if key == local_key else self.bound.unit_bytes(instruction.sent, kind, key) for key in keys]
        incoming = [
            0 if key == local_key else self.bound.unit_bytes(instruction.received, kind, local_key) for key in keys
        ]
        self.tickets[instruction.ticket] = self.comm.all_to_all(
            reduce.ranks,
            kind,
            self.bound.unit_size(instruction.received, kind, local_key)[0] * len(other_keys),
            self.buffers.raw(instruction.sent, sum(outgoing)),
            self.buffers.raw(instruction.received, sum(incoming)),
            (outgoing, incoming),
        )

    def fold(self, instruction: op.Fold) -> None:
        kind, key = instruction.unit
        accumulator = self.accumulator(instruction.unit, instruction.accumulator)
        for tensors in self.buffers.parts(instruction.received, kind, [key] * instruction.parts):
            accumulator.merge(*tensors)

    def finish(self, instruction: op.Finish) -> None:
        if self.program.blocks_per_rank == 1:
            self.result = self.work.finish([self.accumulator(unit, slot) for unit, slot in instruction.results])
        else:
            whole = self.work.empty_results()
            for unit, slot in instruction.results:
                rows = self.local_rows(*unit)
                self.accumulator(unit, slot).copy_into(tuple(x[:, rows] for x in whole[unit[0]]))
            self.result = tuple(itertools.chain.from_iterable(whole.values()))
        self.results.clear()

    def rows(self, kind: str, blocks: Key, key: Key) -> tuple[slice, ...]:
        """Return the rows of the block `key` in the tensors of `blocks`."""
        return rows_of(self.bound.shards, side_of(kind), blocks, key)


EXECUTE = methods_of(Walk)


def _rows_and_pieces(whole: Tensor, tensor: Tensor, rows: tuple[slice, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return views of the given rows of `whole` (B, n, ...), each with the matching piece of `tensor` (B, m, ...)."""
    if len(rows) == 1:
        return [(whole[:, rows[0]], tensor)]
    pieces = tensor.split([row.stop - row.start for row in rows], dim=1)
    return [(whole[:, row], piece) for row, piece in zip(rows, pieces, strict=True)]
