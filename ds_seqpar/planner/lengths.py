"""What samples of many lengths cost, and the Ulysses size of their packs. Does not import torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from ..core.compiler.sharding.heads import even_ulysses
from ..core.compiler.sharding.masks import Mask
from ..core.settings import SequenceParallelConfig
from .estimate import Work, estimate, received, work
from .machine import Machine
from .request import Job, TrainingStep, visible_pairs


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """The estimate of samples and packs, for one model on one machine.

    Args:
        step: The model and the configuration; its length and mask are replaced.
        machine: Where it is trained.
        window: Attention's window in tokens, the same in all layers; None: no window.
    """

    step: TrainingStep
    machine: Machine
    window: int | None = None

    @classmethod
    def of(cls, config: SequenceParallelConfig, job: Job, world: int, machine: Machine) -> Costs:
        """Return the costs of a job whose model is known. config: resolved."""
        assert job.model is not None
        step = TrainingStep(
            model=job.model, config=config, world=world, seq=1, dtype=job.dtype, checkpointing=job.checkpointing
        )
        return cls(step, machine, job.window)

    @functools.cached_property
    def work(self) -> Work:
        return work(self.step, self.machine)

    def seconds(self, documents: Iterable[int]) -> float:
        """Return what documents of these lengths cost, on one rank."""
        documents = tuple(documents)
        return self.work.pair * visible_pairs(documents, self.window) + self.work.token * sum(documents)

    @property
    def ulysses_sizes(self) -> list[int]:
        """The Ulysses sizes that share the model's heads equally, ascending."""
        config, model = self.step.config, self.step.model
        return even_ulysses(config.size, model.heads, model.kv_heads, config.head_chunks)

    def ulysses(self, documents: tuple[int, ...], sizes: Iterable[int]) -> int:
        """Return the one of some Ulysses sizes with which a pack takes the least time; of equal ones the smallest."""
        return min(sizes, key=lambda ulysses: (self._of_pack(documents, ulysses), ulysses))

    def received(self, documents: tuple[int, ...], ulysses: int, rank: int) -> int:
        """Return the bytes that a rank of a group receives in attention of all layers, for a pack that it shares."""
        return received(self._step(documents, ulysses), self.machine, rank)

    def sharing(self, cap: int) -> float:
        """Return what samples that fit a rank's `cap` tokens cost if ranks share them, over what they cost if not."""
        size = self.step.config.size
        documents = (max(1, 3 * cap // 4),) * -(-4 * size // 3)
        least = min(self._of_pack(documents, ulysses) for ulysses in self.ulysses_sizes)
        return max(1.0, least * size / self.seconds(documents))

    def _of_pack(self, documents: tuple[int, ...], ulysses: int) -> float:
        return estimate(self._step(documents, ulysses), self.machine).seconds

    def _step(self, documents: tuple[int, ...], ulysses: int) -> TrainingStep:
        config, mask = self.step.config, Mask(window=self.window, documents=Mask.documents_of(documents))
        config = dataclasses.replace(config, ulysses=ulysses)
        return dataclasses.replace(self.step, config=config, seq=sum(documents), mask=mask)
