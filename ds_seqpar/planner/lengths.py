"""Estimate the cost of samples with different lengths, and choose the Ulysses size for each pack of samples.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence

from ..core.compiler import schedules
from ..core.compiler.sharding.heads import even_ulysses
from ..core.compiler.sharding.layout import multiple
from ..core.compiler.sharding.masks import Mask
from ..core.settings import SequenceParallelConfig
from ..data.dealing import Dealt, deal, deal_by_length, most
from ..data.placing import Pack, Part
from .estimate import Work, estimate, received, work
from .machine import Machine
from .request import Job, TrainingStep, visible_pairs


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """Cost estimates for samples and packs, for one model on one machine.

    Args:
        step: Training step with the model and configuration. The step's length and mask are replaced.
        machine: Machine on which the model is trained.
        window: Sliding window of attention in tokens, which is the same in all layers. None means no window.
    """

    step: TrainingStep
    machine: Machine
    window: int | None = None

    @classmethod
    def of(cls, config: SequenceParallelConfig, job: Job, world: int, machine: Machine) -> Costs:
        """Return the costs for a job with a known model and a resolved configuration."""
        assert job.model is not None
        step = TrainingStep(
            model=job.model, config=config, world=world, seq=1, dtype=job.dtype, checkpointing=job.checkpointing
        )
        return cls(step, machine, job.window)

    @functools.cached_property
    def work(self) -> Work:
        return work(self.step, self.machine)

    def seconds(self, documents: Iterable[int]) -> float:
        """Return the cost of computing documents with these lengths on one rank."""
        documents = tuple(documents)
        return self.work.pair * visible_pairs(documents, self.window) + self.work.token * sum(documents)

    @property
    def ulysses_sizes(self) -> list[int]:
        """Ulysses sizes that divide the model's heads equally, in ascending order."""
        config, model = self.step.config, self.step.model
        return even_ulysses(config.size, model.heads, model.kv_heads, config.head_chunks)

    @property
    def fixed(self) -> str:
        """The reason why all packs use the configured Ulysses size, or "" if packs may use different sizes."""
        config, model = self.step.config, self.step.model
        if model.states is not None or model.latent_projections is not None:
            return "layers have a state, or send latents"
        is_plain = (config.schedule, config.schedule_options, config.rank_order) == (schedules.DEFAULT, (), "auto")
        if config.layout != "balanced" or not is_plain or config.head_chunks == "auto":
            return "a schedule, a layout, a rank order or head chunks are set"
        return ""

    def deal(self, lengths: Sequence[int], seconds: Sequence[float], groups: int, chooses: bool) -> Dealt:
        """Distribute the samples of a step across packs of `tokens_per_rank * size` tokens.

        Args:
            lengths: Length of each sample in tokens.
            seconds: Cost of each sample.
            groups: Number of groups of ranks.
            chooses: Whether samples may stay whole on one rank, in packs that need no messages.

        Raises:
            InputError: A sample is longer than a pack.
        """
        per_rank, size = self.step.config.tokens_per_rank, self.step.config.size
        assert per_rank != "auto"
        if chooses and 0 < max(lengths, default=0) <= per_rank * size:
            return deal_by_length(lengths, seconds, groups, size, per_rank, self.sharing)
        return Dealt(deal(lengths, seconds, groups, per_rank * size), [[]] * groups)

    def pack(self, documents: tuple[int, ...], sizes: Iterable[int]) -> Pack:
        """Return a pack that all ranks in a group share, with the fastest of the given Ulysses sizes."""
        config = self.step.config
        return Pack.shared(documents, config.layout, config.size, self.ulysses(documents, sizes))

    def ulysses(self, documents: tuple[int, ...], sizes: Iterable[int]) -> int:
        """Return the fastest of the given Ulysses sizes for a pack, or the smallest of equally fast sizes."""
        return min(sizes, key=lambda ulysses: (self._of_shared(documents, ulysses), ulysses))

    def received(self, documents: tuple[int, ...], ulysses: int, rank: int) -> int:
        """Return the number of bytes that a rank receives for attention in all layers, for a pack that its group
        shares.
        """
        return received(self._step(documents, ulysses), self.machine, rank)

    @functools.cached_property
    def sharing(self) -> float:
        """Relative cost of sharing samples that fit on one rank, compared to computing them on one rank."""
        size, cap = self.step.config.size, self.step.config.tokens_per_rank
        documents = (max(1, 3 * cap // 4),) * -(-4 * size // 3)
        least = min(self._of_shared(documents, ulysses) for ulysses in self.ulysses_sizes)
        return max(1.0, least * size / self.seconds(documents))

    def packed(self, lengths: Sequence[int], groups: int, chooses: bool = True) -> Packed:
        """Return the packs of a step with samples of these lengths, as `StepDealer` distributes the samples.

        Args:
            lengths: Length of each sample in tokens.
            groups: Number of groups of ranks.
            chooses: Whether Ulysses sizes may differ from the configured size if no setting fixes the size.
        """
        sizes = self.ulysses_sizes if chooses and not self.fixed else [self.step.config.ulysses]
        dealt = self.deal(lengths, [self.seconds([n]) for n in lengths], groups, len(sizes) > 1)
        return Packed(self, [
            [self.pack(tuple(lengths[sample] for sample in pack), sizes) for pack in shared if pack]
            + [Pack.of_whole([[lengths[sample] for sample in pack] for pack in packs]) for packs in whole]
            for shared, whole in zip(*dealt, strict=True)
        ])  # fmt: skip

    def seconds_one_a_group(self, lengths: Sequence[int], groups: int) -> float:
        """Estimate the time of a step in which each group trains on one sample after another.

        Samples are padded to a length that the ranks in a group can share equally.
        """
        config = self.step.config
        share = multiple(config.layout, config.size, config.ulysses)
        of_length = functools.cache(lambda n: self._of_shared((-(-n // share) * share,), config.ulysses))
        return max(sum(map(of_length, lengths[group::groups])) for group in range(groups))

    def works(self, pack: Pack) -> list[float]:
        """Return the number of seconds that each CP rank computes for a pack, with all heads."""
        pair, token = self.work
        return [sum(pair * self._pairs(part) + token * part.tokens for part in parts) for parts in pack.parts]

    def _pairs(self, part: Part) -> int:
        """Return the total number of keys that the tokens of a document part see."""
        if part.step == 1:
            before, all_pairs = (visible_pairs([n], self.window) for n in (part.start, part.start + part.tokens))
            return all_pairs - before
        positions = range(part.start, part.start + part.step * part.tokens, part.step)
        return sum(min(position + 1, self.window or position + 1) for position in positions)

    def seconds_of(self, pack: Pack) -> float:
        """Return the estimated time of a pack, or the computation time of the busiest rank if nothing is sent."""
        if pack.ulysses == 1 and not pack.cut:
            return max(self.works(pack))
        return self._of_shared(pack.documents, pack.ulysses)

    def _of_shared(self, documents: tuple[int, ...], ulysses: int) -> float:
        return estimate(self._step(documents, ulysses), self.machine).seconds

    def _step(self, documents: tuple[int, ...], ulysses: int) -> TrainingStep:
        config, mask = self.step.config, Mask(window=self.window, documents=Mask.documents_of(documents))
        config = dataclasses.replace(config, ulysses=ulysses)
        return dataclasses.replace(self.step, config=config, seq=sum(documents), mask=mask)


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """The packs of an optimizer step, for each group."""

    costs: Costs
    packs: list[list[Pack]]

    @functools.cached_property
    def works(self) -> list[list[float]]:
        """Number of seconds that each rank computes, for each group."""
        of_packs = [
            [[work / pack.ulysses for work in self.costs.works(pack) for _ in range(pack.ulysses)] for pack in packs]
            for packs in self.packs
        ]
        return [[sum(of_rank) for of_rank in zip(*works, strict=True)] for works in of_packs]

    @functools.cached_property
    def seconds(self) -> float:
        """Estimated time of the slowest group."""
        return max(sum(map(self.costs.seconds_of, packs)) for packs in self.packs)

    @property
    def of_ranks(self) -> float:
        """Ratio of the maximum to the mean computation time across ranks."""
        return most([work for works in self.works for work in works])

    @property
    def of_groups(self) -> float:
        """Ratio of the maximum to the mean computation time across groups."""
        return most([sum(works) for works in self.works])

    @property
    def cut(self) -> int:
        """Number of documents that are split across CP ranks."""
        return sum(len(pack.cut) for packs in self.packs for pack in packs)

    @property
    def ulysses(self) -> dict[int, int]:
        """Number of packs with each Ulysses size, in all groups together."""
        return dict(sorted(Counter(pack.ulysses for packs in self.packs for pack in packs).items()))
