"""Find the first NaN or inf during training if `check_finite` is enabled.

A rank that finds a non-finite number continues until ranks compare their findings, because the other ranks would
otherwise wait forever. Ranks compare their findings at the end of each attention call and of a patched model's forward
pass, and around an engine's `backward` and `step`. All ranks then raise an error with the earliest finding.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..base import compat
from ..base.errors import InputError, ranks_in_words
from ..core.compiler.program import instructions as op
from ..core.compiler.program.instructions import label_of
from ..core.compiler.schedules.actions import ACCUMULATORS, unit_name
from ..core.runtime.groups import Groups
from ..core.runtime.seams import Guard, GuardedCall
from ..core.runtime.transport import Group, TorchComm
from ..core.runtime.walk import Observer, Walk
from .agreement import Entry, all_gather_objects, assert_ranks_agree, raise_difference, ranks_of
from .backward_order import Calls

NAME = "numbers that must be finite"
SPREAD = 1e-5  # allowed relative difference between ranks' gradient norms
ADVICE = "see its operands, or take another kernel"
SUMMED = "though the gradients of each rank were finite after backward"
LINKS = "what clips or changes them between backwards, as later hooks do, and the links between ranks"
MADE = 1 << 30  # step number for a call's results, after all steps of the program


class Finding(NamedTuple):
    """Non-finite numbers that were found on a rank."""

    step: int  # step of the attention call in which the numbers were found; negative before the first step
    where: str
    advice: str
    numbers: str  # first number and count
    sender: int | None = None  # global rank that sent the numbers
    ranks: tuple[int, ...] = ()  # ranks that have the numbers; set after a comparison


class Finite(Guard):
    """Guard that keeps this rank's findings since the last comparison.

    Args:
        groups: This rank's groups.
        calls: Counter that provides the names of calls.
        sequences: Number of groups of ranks. Each group shares a sequence.

    Attributes:
        call: Name of the current attention call.
        scaled: Whether loss scaling may make this call's gradients infinite.
    """

    def __init__(self, groups: Groups, calls: Calls, sequences: int) -> None:
        self.groups, self.calls, self.sequences = groups, calls, sequences
        self.found: Finding | None = None
        self.call, self.scaled = "", False
        self.engine: Any = None  # weak reference
        # number of backward passes in this step, and number of forward passes of patched models
        self.microbatches = self.forwards = 0

    def __deepcopy__(self, memo: dict) -> Finite:
        return self  # copies of a model share the SequenceParallel and its guard

    def look(self, what: str, how: str, x: object, advice: str, step: int = -1, sender: int | None = None) -> None:
        """Record a tensor or number that is not finite, unless an earlier finding is already recorded.

        Args:
            what: Name of the tensor or number. -inf is allowed in an lse and in sinks.
            how: Clause that states where the numbers come from.
            x: Tensor or number to check; any other object is ignored.
            advice: Clause that states the remedy.
            step: Program step, stored in the `Finding`.
            sender: Global rank that sent the numbers, stored in the `Finding`.
        """
        negative = what.split(" of ")[0].endswith(("lse", "sinks"))
        if not (self.found or self.scaled) and (numbers := not_finite(x, negative)):
            self.found = Finding(step, f"{what}, {how}", advice, numbers, sender)

    def agree(self, group: Group, step: int | None = None, later: bool = False) -> None:
        """Raise an error on all ranks in a group if any rank has findings since the last comparison.

        All ranks in the group must call this function.

        Args:
            group: Group of ranks that compare their findings; None for a single rank.
            step: Number of the optimizer step that has just ended, if any.
            later: Whether to keep the first finding for a later comparison in a larger group instead of raising an
                error.
        """
        self.scaled = False
        if not assert_ranks_agree(group, NAME, None, number=int(self.found is not None)):
            return
        found = [finding for _, finding in all_gather_objects(group, (NAME, self.found))]
        first, members = min(filter(None, found), key=lambda finding: finding[:3]), ranks_of(group)
        by_rank = dict(zip(members, found, strict=True))
        while (before := by_rank.pop(first.sender, None)) is not None and before.step <= first.step:
            first = before
        alike = [other is not None and other[:3] == first[:3] for other in found]
        ranks = first.ranks or tuple(itertools.compress(members, alike))
        self.found = first._replace(ranks=ranks) if later else None
        if later:
            return
        when = self.when() if step is None else f", in step {step}"
        on = f"{ranks_in_words(ranks)}{when}"
        got = f"{first.numbers} in {first.where}, on {on}"
        error = InputError(f"check_finite needs finite numbers; got {got}, {first.advice}")
        raise_difference(group, [Entry.of(NAME, None)], error if dist.get_rank() == ranks[0] else None)

    def when(self) -> str:
        """Return a clause that names the optimizer step and micro-batch, or the model's forward pass, if known."""
        if self.engine is not None and (engine := self.engine()) is not None:
            return f", in step {engine.global_steps + 1}, micro-batch {self.microbatches + 1}"
        return f", in forward {self.forwards} of the model" if self.forwards else ""

    @contextlib.contextmanager
    def around(self, call: GuardedCall) -> Iterator[None]:
        """Check the inputs of an attention call, and agree on findings at the end of the call."""
        if not call.operands:
            yield
            return
        is_forward, dtypes = call.direction == "forward", [getattr(x, "dtype", None) for x in call.operands.values()]
        self.call = f"{call.title} (call {self.calls.count})" if is_forward else self.calls.name_of_current()
        # with fp16 loss scaling, inf can occur in the backward pass, and the step is then skipped
        self.scaled = compat.graph_task() >= 0 and torch.float16 in dtypes
        for name, x in call.operands.items():
            self.look(f"{name} of {self.call}", "which came in", x, "see what made it")
        yield
        self.agree_on_call()

    def agree_on_call(self) -> None:
        """Agree on findings at the end of a call.

        All ranks that share the sequence must call this function. If an engine trains on several sequences, findings
        are raised on the ranks of all sequences, before or after the engine's `backward`. Without such an engine, any
        problem found is raised as an error at the end of the call.
        """
        trains = torch.is_grad_enabled() or compat.graph_task() >= 0
        self.agree(self.groups.control, later=trains and self.engine is not None and self.sequences > 1)

    def watch_gradients(self, model: torch.nn.Module) -> list[RemovableHandle]:
        """Check each gradient directly after its parameter's backward pass, and again after hooks and accumulation.

        Gradients are summed across ranks only after both checks.

        Returns:
            Handles of the installed hooks.
        """
        handles: list[RemovableHandle] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_hook(functools.partial(self.look_at_made, name)))
                after = functools.partial(self._look_after_hooks, name)
                handles.append(parameter.register_post_accumulate_grad_hook(after))
        return handles

    def look_at_made(self, what: str, gradient: Tensor, by: str = "its backward") -> None:
        """Check the gradient of `what`, which was computed by `by`."""
        if gradient.dtype != torch.float16:  # with fp16 loss scaling, inf can occur, and the step is then skipped
            self.look(f"the gradient of {what}", f"which {by} made", gradient, "see the size of what it is made of")

    def _look_after_hooks(self, name: str, parameter: Tensor) -> None:
        if (gradient := parameter.grad) is not None and gradient.dtype != torch.float16:
            advice = "see the hooks on it, and what clips or changes the gradient that it is added to"
            self.look(f"the gradient of {name}", "though its backward made finite numbers", gradient, advice)

    def around_engine(self, engine: Any, world: Group) -> dict[str, Callable[..., Any]]:
        """Check an engine's losses, gradients and optimizer states, and compare gradient norms across ranks.

        Returns:
            Wrappers for engine methods, by method name. All ranks in the job must call each wrapper.
        """
        self.engine = weakref.ref(engine)

        def checked_backward(backward: Callable, loss: Any, *args: Any, **kwargs: Any) -> Any:
            self.look("the loss", "which came into backward", loss, "see what computes it")
            self.agree(world)
            result = backward(loss, *args, **kwargs)
            self.agree(world)  # before the gradients summed across ranks are checked
            if engine.is_gradient_accumulation_boundary():
                self._look_at_sums(engine, SUMMED, f"see {LINKS}")
                self.agree(world)
            self.microbatches += 1
            return result

        def checked_step(step: Callable, *args: Any, **kwargs: Any) -> Any:
            if not engine.is_gradient_accumulation_boundary():
                return step(*args, **kwargs)
            number, self.microbatches = engine.global_steps + 1, max(0, self.microbatches - 1)
            self._look_at_sums(engine, "which was finite after backward", "see what clips or changes gradients since")
            self._look_at_states(engine, f"before optimizer step {number}")
            self.agree(world)
            result = step(*args, **kwargs)
            self.microbatches = 0
            if not engine.fp16_enabled():
                self._compare_norms(engine.get_global_grad_norm(), number, world)
            for name, x in engine.module.named_parameters():
                x = getattr(x, compat.PARTITION, x)
                self.look(name, f"which optimizer step {number} made", x, "see its learning rate, state and hooks")
            self._look_at_states(engine, f"after optimizer step {number}")
            self.agree(world, number)
            return result

        return {"backward": checked_backward, "step": checked_step}

    def _look_at_sums(self, engine: Any, how: str, advice: str) -> None:
        """Check gradients after they have been summed across ranks."""
        if engine.fp16_enabled():  # with fp16 loss scaling, inf can occur, and the step is then skipped
            return
        for x in compat.tree_leaves(getattr(engine.optimizer, compat.SUMMED, None)):
            self.look("a gradient that ZeRO has summed", how, x, advice)
        for name, x in engine.module.named_parameters():
            self.look(f"the gradient of {name}, summed", how, x.grad, advice)

    def _look_at_states(self, engine: Any, when: str) -> None:
        for state in getattr(compat.basic_optimizer(engine), "state", {}).values():
            for name, x in state.items():
                self.look(f"{name} of the optimizer's state", when, x, "see the checkpoint or code that has set it")

    def _compare_norms(self, norm: Any, number: int, world: Group) -> None:
        if norm is None:  # the engine has not computed the norm
            return
        norm = float(norm)
        norms = torch.tensor([x for _, x in all_gather_objects(world, ("gradient norm", norm))], dtype=torch.float64)
        if not torch.isclose(norms, norms[:1], rtol=SPREAD, atol=0.0, equal_nan=True).all():
            assert_ranks_agree(world, f"gradient norm of step {number}", {"norm": float(f"{norm:.6g}")})
        self.look("the gradient norm", SUMMED, norm, f"see their size, {LINKS}")


def not_finite(x: object, negative: bool = False) -> str:
    """Describe the non-finite elements of a tensor or number, or return "" if all elements are finite.

    Args:
        x: Tensor or number to check; any other object counts as finite.
        negative: Whether -inf counts as finite.
    """
    if isinstance(x, int | float):
        return "" if math.isfinite(x) else str(x)
    plain = isinstance(x, Tensor) and type(x) in (Tensor, torch.nn.Parameter)  # subclasses may communicate
    if not isinstance(x, Tensor) or not plain or not x.is_floating_point() or x.is_meta:
        return ""
    wrong = ~x.detach().isfinite()
    if negative:
        wrong &= x != -torch.inf
    count = int(wrong.sum())
    return f"{float(x.detach()[wrong][0])} in {count} of {x.numel()} numbers" if count else ""


class LooksAtWalks(Observer):
    """Observer that checks the tensors received while a plan runs, and the results of each instruction."""

    def __init__(self, finite: Finite) -> None:
        self.finite = finite
        self.started: dict[int, op.Started] = {}  # instructions that started transfers, by ticket

    def end(self, walk: Walk, results: list[Tensor] | None) -> None:
        self.started.clear()
        for x in (results or [])[: 1 if walk.program.direction == "forward" else None]:
            self.finite.look(f"the result of {self.finite.call}", "which was made there", x, ADVICE, MADE)

    def after(self, walk: Walk, instruction: op.Instruction) -> None:
        where = f"in {self.finite.call}, {walk.program.name} step {instruction.step}"
        if isinstance(instruction, op.Started):
            self.started[instruction.ticket] = instruction
        if isinstance(instruction, op.Wait):
            for rank, what, x in _arrived(walk, self.started.pop(instruction.ticket)):
                how, advice = f"which came over the wire from rank {rank} {where}", f"see its link to rank {rank}"
                self.finite.look(what, how, x, advice, instruction.step, rank)
            return
        for what, x in _made(walk, instruction):
            self.finite.look(what, f"made {where}", x, ADVICE, instruction.step)


def _fields(walk: Walk, kind: str) -> list[str]:
    return [field.name for field in walk.bound.shape.fields(walk.program.direction, kind)]


def _arrived(walk: Walk, started: op.Started) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the sender's global rank, the name and the tensor for each item received from other ranks."""
    groups = cast(TorchComm, walk.comm).groups
    if isinstance(started, op.ExchangeStart):
        sizes = walk.bound.exchange_sizes(started.exchange)
        received = walk.buffers.elements(started.received, sizes.dtype)[: sum(sizes.incoming)]
        for rank, x in enumerate(received.split(list(sizes.incoming))):
            yield ranks_of(groups.ulysses)[rank], " and ".join(started.exchange.fields), x
        return
    if isinstance(started, op.Post):
        units = [(t.peer, t.unit, walk.buffers.tensors(t.slot, t.unit)) for t in started.receives]
    else:  # an all-gather receives every rank's block, an all-to-all receives partial results for this rank's block
        kind, key_of, local = started.collective.kind, started.collective.key_of, walk.program.rank
        gathers = isinstance(started, op.GatherStart)
        ranks = [rank for rank in walk.comm.order(started.ranks) if gathers or rank != local]
        keys = [key_of(rank if gathers else local) for rank in ranks]
        parts = walk.buffers.parts(started.received, kind, keys)
        units = [(rank, (kind, key), x) for rank, key, x in zip(ranks, keys, parts, strict=True)]
    for rank, unit, tensors in units:
        for field, x in zip(_fields(walk, unit[0]), tensors, strict=True):
            yield ranks_of(groups.inner)[groups.cp_order[rank]], f"{unit_name(unit)}'s {field}", x


def _made(walk: Walk, instruction: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each result of an instruction."""
    label = label_of(instruction)
    if isinstance(instruction, op.Finish):
        names = [name for kind in ACCUMULATORS[walk.program.direction] for name in _fields(walk, kind)]
        yield from ((f"{label}'s {name}", x) for name, x in zip(names, walk.result, strict=True))
    units = [unit for unit, _ in instruction.results] if isinstance(instruction, op.Product) else []
    units += [instruction.unit] if isinstance(instruction, op.Merge | op.Fold) else []
    for unit in units:
        if unit in walk.results:
            for name, x in zip(_fields(walk, unit[0]), walk.results[unit].written, strict=True):
                yield f"{label}'s {name}", x
