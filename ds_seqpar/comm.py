"""Executes transfers over torch.distributed, and counts what it receives. The only caller of isend and irecv."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import CommunicationError


@dataclasses.dataclass(frozen=True)
class Message:
    """A tensor to or from `peer` (an inner rank). kind: what it is, for counting. tag: the same on both ends."""

    peer: int
    kind: str
    tensor: Tensor
    tag: int


class Handle(Protocol):
    def wait(self) -> None: ...


class Comm(Protocol):
    """What a plan is walked over. received: elements that arrived from other ranks, by kind."""

    received: Counter

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """Starts all of them; after the handle's wait the received tensors are filled and the sent ones free."""
        ...

    def all_to_all(self, kind: str, buffer: Tensor) -> Tensor:
        """buffer (members, n): row i goes to Ulysses member i; row i of the result comes from member i."""
        ...


class _Works:
    """Owns works and tensors until they are done: a dropped isend loses its message."""

    def __init__(self, works: list, tensors: list[Tensor]) -> None:
        self.works, self.tensors = works, tensors

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise CommunicationError(f"a transfer failed, mostly because another rank ended: {error}") from error
        self.works, self.tensors = [], []


class TorchComm:
    """Over process groups (gloo or NCCL)."""

    def __init__(self, inner: dist.ProcessGroup, ulysses: dist.ProcessGroup) -> None:
        self.inner, self.ulysses = inner, ulysses
        self.received: Counter = Counter()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        sent = [dataclasses.replace(m, tensor=m.tensor.contiguous()) for m in sends]
        ops = [
            dist.P2POp(op, m.tensor, group=self.inner, tag=m.tag, group_peer=m.peer)
            for op, messages in ((dist.isend, sent), (dist.irecv, receives))
            for m in messages
        ]
        for message in receives:
            self.received[message.kind] += message.tensor.numel()
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise CommunicationError(f"a transfer could not start: {error}") from error
        return _Works(works, [m.tensor for m in (*sent, *receives)])

    def all_to_all(self, kind: str, buffer: Tensor) -> Tensor:
        result = torch.empty_like(buffer)
        try:
            dist.all_to_all_single(result, buffer.contiguous(), group=self.ulysses)
        except RuntimeError as error:
            raise CommunicationError(
                f"the Ulysses all-to-all failed, mostly because another rank ended: {error}"
            ) from error
        self.received[kind] += buffer.numel() - buffer[0].numel()
        return result
