"""Share by length: the samples of an optimizer step as packs, in which short samples are whole on a rank.

All ranks read all samples of a step. So each of them deals these to groups and micro-batches in the same way, and no
sample is sent. Nothing else depends on how they are dealt: losses are divided by the labels of the whole step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from . import planning
from .base.errors import SECTION, ConfigError, InputError, SeqParError
from .base.fingerprint import Fingerprint
from .base.log import log_once
from .base.on_devices import to_device
from .core.compiler import schedules
from .core.compiler.sharding.layout import Run, Runs
from .core.compiler.sharding.masks import Mask
from .core.compiler.sharding.shards import UnevenShards
from .core.runtime import groups
from .core.runtime.runtime import Runtime
from .core.runtime.transport import TorchComm
from .data.balance import shards_of
from .data.batch_layout import Apart, positions_held
from .data.batches import lengths_of
from .data.checks import IGNORE, labels_of
from .data.dealing import Dealt, deal, deal_by_length
from .data.documents import READ
from .data.inputs import LAYOUT
from .data.loader import Loader, is_dealt
from .data.value_checks import fingerprint_of
from .guards.agreement import maximum, together
from .guards.interfaces import gloo_meets_hosts
from .guards.waits import explaining_failure
from .models import patcher_of_class

REMEMBERED = 4096  # packs whose shards are known; others are as without packs
CALL = "sp.packs"


class Row(NamedTuple):
    """A sample without padding."""

    tensors: dict[str, Tensor]  # by name, (1, its tokens, ...)
    documents: tuple[int, ...]  # lengths

    @property
    def tokens(self) -> int:
        return sum(self.documents)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A loader's collate_fn that makes a row of each sample alone, by the loader's own one."""

    collate: Any

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        return [self.collate([sample]) for sample in samples]


class StepDealer:
    """Makes this group's packs of the samples of an optimizer step. Collective over the world, as each step is.

    Args:
        sp: The SequenceParallel.

    Raises:
        ConfigError: No `tokens_per_rank` is set, or what is trained is no sum over its tokens.
    """

    def __init__(self, sp: Any) -> None:
        self.sp = sp
        if sp.config.tokens_per_rank == "auto":
            raise ConfigError(
                f"packs need {SECTION}.tokens_per_rank, the most tokens of a micro-batch that a rank holds; got none, "
                "set it"
            )
        if sp.size == 1:
            raise ConfigError("packs are shared by groups of 2 ranks or more; got size 1, leave tokens_per_rank out")
        self.cap = sp.config.tokens_per_rank * sp.size
        model = _model(sp)
        patcher, dtype = patcher_of_class(model), str(next(model.parameters()).dtype).removeprefix("torch.")
        assert patcher is not None  # which has patched the model
        self.costs = planning.costs_of_all(sp.control_world, sp.config, dtype, partial(patcher.job_of, model))
        self.sizes = sp.sharding.ulysses_sizes = _ulysses_sizes(sp, self.costs)
        for ulysses in self.sizes:
            if ulysses != sp.config.ulysses:
                sp.runtimes[sp.size // ulysses] = _runtime(sp, ulysses)
        self.sharing = self.costs.sharing(sp.config.tokens_per_rank) if self._chooses else 1.0
        self.has_said = False

    def packs(self, samples: Sequence[Any], error: SeqParError | None = None) -> list[dict[str, Any]]:
        """Return this group's micro-batches of a step: whole batches of one row, with the step's number of labels.

        Args:
            samples: Of the step, in the same order on all ranks; each is a batch of one row.
            error: Of this rank, which all ranks then raise.

        Returns:
            The micro-batches, as many for each group; `num_items_in_batch` in each makes the sum of their losses this
            group's part of the step's, times the number of groups.

        Raises:
            InputError: A sample is no row of tokens, or longer than a micro-batch; on all ranks.
            DisagreementError: Ranks have other samples.
        """
        sp, batches = self.sp, list[dict[str, Any]]()
        action, name = "packing the samples of a step", "samples of a step"
        with together(sp.control_world, action, name, error=error, call=CALL, advice=_advice) as agreed:
            rows = [self._row(sample) for sample in samples]
            of_rows = [self.costs.seconds(row.documents) for row in rows]
            dealt = self._deal([row.tokens for row in rows], of_rows)
            agreed.value = {"samples": len(rows), "tokens": _digest(rows), "packs": str(Fingerprint.of(str(dealt)))}
            batches = [self._batch([rows[sample] for sample in pack]) for pack in dealt.shared[sp.data_rank]]
            batches += [
                self._batch_of_whole([[rows[sample] for sample in pack] for pack in packs])
                for packs in dealt.whole[sp.data_rank]
            ]
            items = max(sum(int((row.tensors["labels"] != IGNORE).sum()) for row in rows), 1) / sp.data_size
        if not self.has_said:
            self._say_once(dealt, of_rows, [lengths_of(batch) for batch in batches[: len(dealt.shared[0])]])
        return [{**batch, "num_items_in_batch": items} for batch in batches]

    def _row(self, sample: Any) -> Row:
        """Return a sample's tokens without padding. Its labels count where a token of its document predicts them."""
        labels = labels_of(sample)
        if len(labels) != 1 or not isinstance(sample.get("input_ids"), Tensor):
            raise InputError(
                f"packs are made of samples with input_ids and labels in one row each; got {len(labels)} rows of "
                f"{', '.join(map(str, sample))}, give a collator that makes a row of a sample"
            )
        mask, documents, table = sample.get("attention_mask"), lengths_of(sample), self.sp.sharding.inputs_with()
        if not all(documents):
            raise InputError("packs are made of samples with one token or more; got one with none, leave it out")
        kept = slice(None) if mask is None else mask[0].bool().cpu()
        tensors = {}
        for name, x in sample.items():
            if name in READ or table.get(name) == LAYOUT or x is None:
                continue
            if name not in table or table[name].kind != "tokens" or x.shape[:2] != labels.shape:
                raise InputError(
                    f"packs are made of what has an entry for each token, (1, tokens, ...); got {name}, leave it out, "
                    "or declare it as tokens()"
                )
            tensors[name] = x[:, kept]
        starts = torch.tensor([0, *documents[:-1]], device="cpu").cumsum(0)
        tensors["labels"] = tensors["labels"].cpu().index_fill(1, starts, IGNORE)
        return Row(tensors, documents)

    def _batch(self, pack: list[Row]) -> dict[str, Tensor]:
        """Return a pack as a batch of one row. Where ranks would have no token, it has some that count nothing."""
        if (missing := self.sp.size - sum(row.tokens for row in pack)) > 0:
            pack = [*pack, _filler(pack, missing)]
        documents = tuple(length for row in pack for length in row.documents)
        if self._chooses and documents not in self.sp.sharding.shards_of:
            ulysses = self.costs.ulysses(documents, self.sizes)
            self._place(documents, shards_of(self.sp.config.layout, documents, self.sp.size // ulysses))
        return _joined(pack, documents)

    def _batch_of_whole(self, packs: list[list[Row]]) -> dict[str, Tensor]:
        """Return a batch of one row in which each rank has the documents of one pack."""
        all_rows, end, runs = [row for pack in packs for row in pack], 0, list[Runs]()
        packs = [pack or [_filler(all_rows, 1)] for pack in packs]
        for tokens in (sum(row.tokens for row in pack) for pack in packs):
            runs.append((Run(end, 1, tokens),))
            end += tokens
        pack = [row for pack in packs for row in pack]
        documents = tuple(length for row in pack for length in row.documents)
        self._place(documents, Apart(runs))
        return _joined(pack, documents)

    @property
    def _chooses(self) -> bool:
        """Whether packs have shards of their own: not where the mesh of the configured size was given to somebody."""
        return len(self.sizes) > 1 and "device_mesh" not in vars(self.sp)

    def _deal(self, tokens: Sequence[int], costs: Sequence[float]) -> Dealt:
        sp = self.sp
        if self._chooses and 0 < max(tokens, default=0) <= self.cap:
            cap = sp.config.tokens_per_rank
            return deal_by_length(tokens, costs, sp.data_size, sp.size, cap, self.sharing)
        return Dealt(deal(tokens, costs, sp.data_size, self.cap), [[]] * sp.data_size)

    def _place(self, documents: tuple[int, ...], shards: UnevenShards) -> None:
        known = self.sp.sharding.shards_of
        known[documents] = shards
        if len(known) > REMEMBERED:
            del known[next(iter(known))]

    def _say_once(self, dealt: Dealt, costs: Sequence[float], shared: Sequence[tuple[int, ...]]) -> None:
        """Log how equal the first step's work is, and what ranks receive. Collective over the world.

        Args:
            dealt: The packs of the step.
            costs: Of its samples.
            shared: The documents of each pack that this group shares.
        """
        sp, (pair, token), cut, received = self.sp, self.costs.work, 0, 0
        by_rank = [[*pack] for pack in zip(*dealt.whole[sp.data_rank], strict=True)] or [[]] * sp.size
        works = [sum(costs[sample] for pack in packs for sample in pack) for packs in by_rank]
        for documents in shared:
            placement = sp.place(sum(documents), documents)
            starts = torch.tensor(Mask.documents_of(documents), device="cpu")
            ulysses, holding = sp.sharding.ulysses(placement), torch.zeros_like(starts)
            for rank in range(placement.shards.size):
                at = positions_held(placement.shards, 1, rank)
                of = torch.searchsorted(starts, at, right=True) - 1
                holding[of.unique()] += 1
                work = float((pair * (at - starts[of] + 1) + token).sum()) / ulysses
                for number in range(rank * ulysses, (rank + 1) * ulysses):
                    works[number] += work
            cut += int((holding > 1).sum())
            received += self.costs.received(documents, ulysses, sp.rank)
        of_groups = [
            sum(costs[sample] for pack in (*packs, *itertools.chain(*whole)) for sample in pack)
            for packs, whole in zip(dealt.shared, dealt.whole, strict=True)
        ]
        most, count = maximum(sp.control_world, received, "bytes of packs"), sum(map(len, shared))
        count += sum(len(pack) for packs in by_rank for pack in packs)
        log_once(
            f"sequence_parallel: the first step's work, most over mean: {_most(of_groups):.3f} over {len(of_groups)} "
            f"groups, {_most(works):.3f} over the {len(works)} ranks of the first one; {cut} of its {count} documents "
            f"are cut ({cut / max(count, 1):.1%}); in attention a rank receives {most / 2**20:.3g} MiB at most"
        )
        self.has_said = True


class PackLoader(Loader):
    """The packs of each optimizer step: those of this group. See `SequenceParallel.packs`."""

    def __init__(self, sp: Any, loader: Any, read_once: bool = False) -> None:
        self.dealer = sp.step_dealer
        super().__init__(sp.sharding, loader, read_once, groups=1)

    def dealt(self, loader: Any) -> Any:
        if not isinstance(loader, DataLoader) or (loader.batch_size is None and loader.batch_sampler is None):
            raise ConfigError(
                f"{CALL} needs a DataLoader of torch that makes batches, each the samples of an optimizer step; got "
                f"{type(loader).__name__}"
            )
        if is_dealt(self.sp, loader) and self.sp.data_size > 1:
            raise ConfigError(
                f"{CALL} deals the samples of each step to groups; got a loader that is dealt by its sampler, give it "
                "the plain run's on one rank, whose batches have the samples of all"
            )
        whole = super().dealt(loader)
        whole.collate_fn = Rows(loader.collate_fn)
        return whole

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for samples in super().__iter__():
            yield [self._on_device(batch) for batch in self.dealer.packs(samples)]

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch as models take it best: hosts read what says where documents are."""
        moved = {name: to_device(x, self.dealer.sp.device) for name, x in batch.items() if isinstance(x, Tensor)}
        return batch | {name: x for name, x in moved.items() if name not in READ}


def _model(sp: Any) -> Any:
    """Return the patched model whose sizes count. Raises ConfigError where packs would give another loss."""
    if (model := next(iter(sp.sharding.vocabularies), None)) is None:
        raise ConfigError(
            f"{CALL} counts what samples cost by the sizes of a patched model; got none, call share_sequences or "
            "initialize before"
        )
    if getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            "packs need a loss that is a sum over tokens; got experts whose balance is counted in each micro-batch, "
            "set output_router_logits=False, or leave tokens_per_rank out"
        )
    return model


def _ulysses_sizes(sp: Any, costs: Any) -> list[int]:
    """Return the Ulysses sizes that a pack may have; the configured one alone where another would not fit."""
    config, model, sizes = sp.config, costs.step.model, [sp.config.ulysses]
    why = {
        "the settings give it": not sp.ulysses_is_free,
        "layers have a state, or send latents": model.states is not None or model.latent_projections is not None,
        "device_mesh was given out": "device_mesh" in vars(sp),
        "a schedule, a layout, a rank order or head chunks are set": config.layout != "balanced"
        or (config.schedule, config.schedule_options, config.rank_order) != (schedules.DEFAULT, (), "auto")
        or config.head_chunks == "auto",
    }
    if fixed := [reason for reason, holds in why.items() if holds]:
        log_once(f"sequence_parallel: all packs have ulysses {config.ulysses}, since {fixed[0]}")
        return sizes
    return sorted({*sizes, *costs.ulysses_sizes})


def _runtime(sp: Any, ulysses: int) -> Runtime:
    """Return the runtime of calls with another Ulysses size, with groups of its own. Collective over the world."""
    config, rank, world = dataclasses.replace(sp.config, ulysses=ulysses), dist.get_rank(), sp.control_world
    topology = config.topology(world.size())
    with explaining_failure("making process groups", world):
        made = groups.create(topology, rank, world, config.max_ctas, gloo_meets_hosts, of=sp.groups)
        dist.barrier(world)
    comm = TorchComm(made, explaining_failure)
    return Runtime(config, topology, made.cp_rank, comm, topology.index(rank, "ulysses"), of=sp.runtime)


def _most(works: Sequence[float]) -> float:
    """Return the most over the mean."""
    return max(works) * len(works) / (sum(works) or 1.0)


def _filler(pack: Sequence[Row], tokens: int) -> Row:
    """Return a row of tokens that count nothing, with the tensors of a pack."""
    filler = torch.zeros(1, tokens, dtype=torch.int64, device="cpu")
    kinds = pack[0].tensors if pack else {"input_ids": filler, "labels": filler}
    zeros = {name: x.new_zeros(1, tokens, *x.shape[2:]) for name, x in kinds.items()}
    return Row({**zeros, "labels": filler + IGNORE}, (tokens,))


def _joined(pack: Sequence[Row], documents: tuple[int, ...]) -> dict[str, Tensor]:
    batch = {name: torch.cat([row.tensors[name] for row in pack], 1) for name in pack[0].tensors}
    return {**batch, "position_ids": torch.cat([torch.arange(n, device="cpu") for n in documents])[None]}


def _digest(rows: Sequence[Row]) -> str:
    return str(Fingerprint.of(*(fingerprint_of(row.tensors[name]) for row in rows for name in sorted(row.tensors))))


def _advice(by_rank: Any) -> str:
    return "give all ranks the same data set, in the same order: seed them alike"
