"""Arrange the samples of an optimizer step in packs that keep short samples whole on one rank.

All ranks read all samples of a step, and assign the samples to groups and micro-batches in the same way, so no sample
is sent between ranks. The assignment affects only speed, because losses are divided by the number of labels in the
whole step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
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
from .core.runtime import groups
from .core.runtime.runtime import Runtime
from .core.runtime.transport import TorchComm
from .data.batches import fingerprint, lengths_of
from .data.checks import IGNORE, labels_of
from .data.dealing import Dealt, most
from .data.documents import READ
from .data.inputs import LAYOUT
from .data.loader import Loader, is_dealt
from .data.placing import Pack
from .guards.agreement import maximum, together
from .guards.interfaces import gloo_meets_hosts
from .guards.waits import explaining_failure
from .models import patcher_of_class

REMEMBERED = 4096  # number of packs whose shards are remembered; all other batches use the default shards
CALL = "sp.packs"


class Row(NamedTuple):
    """A sample without padding."""

    tensors: dict[str, Tensor]  # tensors (1, tokens, ...) by name
    documents: tuple[int, ...]  # lengths
    media: Mapping[str, Any] = {}  # inputs without an entry per token, such as images
    positions: Tensor | None = None  # (axes, 1, tokens), for a sample with media

    @property
    def tokens(self) -> int:
        return sum(self.documents)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A collate_fn that applies the loader's own collate_fn to each sample separately."""

    collate: Any

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        return [self.collate([sample]) for sample in samples]


class StepDealer:
    """Creates this group's packs from the samples of each optimizer step.

    The constructor and each step are collective across all ranks.

    Args:
        sp: The SequenceParallel.

    Raises:
        ConfigError: `tokens_per_rank` is not set, or the loss is not a sum over tokens.
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
        assert patcher is not None  # since the model is patched
        self.packing = patcher.packing(model)
        self.costs = planning.costs_of_all(sp.control_world, sp.config, dtype, self.packing.job_of)
        self.sizes = sp.sharding.ulysses_sizes = _ulysses_sizes(sp, self.costs)
        for ulysses in self.sizes:
            if ulysses != sp.config.ulysses:
                sp.runtimes[sp.size // ulysses] = _runtime(sp, ulysses)
        self.has_said = False

    def packs(self, samples: Sequence[Any], error: SeqParError | None = None) -> list[dict[str, Any]]:
        """Return this group's micro-batches for a step, as whole batches of one row with the step's number of labels.

        Args:
            samples: The step's samples, in the same order on all ranks. Each sample is a batch of one row.
            error: An error on this rank, which all ranks will raise.

        Returns:
            The micro-batches, of which each group has the same number. With their `num_items_in_batch`, the sum of the
            losses is this group's part of the step's loss, multiplied by the number of groups.

        Raises:
            InputError: A sample is not a row of tokens, or is longer than a micro-batch. Raised on all ranks.
            DisagreementError: Ranks have different samples.
        """
        sp, batches = self.sp, list[dict[str, Any]]()
        action, name = "packing the samples of a step", "samples of a step"
        with together(sp.control_world, action, name, error=error, call=CALL, advice=_advice) as agreed:
            rows = [self._row(sample) for sample in samples]
            if len({frozenset(row.tensors) for row in rows}) > 1:
                names = " and ".join(sorted({", ".join(sorted(row.tensors)) for row in rows}))
                raise InputError(
                    f"the samples of a step must have the same entries for each token; got {names}, give all of them "
                    "what one has"
                )
            of_rows = [self.costs.seconds(row.documents) for row in rows]
            dealt = self.costs.deal([row.tokens for row in rows], of_rows, sp.data_size, self._chooses)
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
        """Return a sample without padding.

        The label of each document's first token is ignored, since no token predicts it.
        """
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
        tensors, media = {}, self.packing.media_of(sample)
        for name, x in sample.items():
            if name in READ or table.get(name) == LAYOUT or x is None or name in media:
                continue
            if name not in table or table[name].kind != "tokens" or x.shape[:2] != labels.shape:
                raise InputError(
                    f"packs are made of what has an entry for each token, (1, tokens, ...); got {name}, leave it out, "
                    "or declare it as tokens()"
                )
            tensors[name] = x[:, kept]
        starts = torch.tensor([0, *documents[:-1]], device="cpu").cumsum(0)
        tensors["labels"] = tensors["labels"].cpu().index_fill(1, starts, IGNORE)
        positions = self.packing.positions_of({**tensors, **media}).cpu() if media else None
        if positions is not None and len(positions) > 1 < len(documents):
            raise InputError(
                f"samples with images must be one document each, where positions have several axes; got one of "
                f"{len(documents)}, give each document as a sample"
            )
        return Row(tensors, documents, media, positions)

    def _batch(self, pack: list[Row]) -> dict[str, Any]:
        """Return a pack as a batch of one row, filled with ignored tokens if some ranks would have no tokens."""
        if (missing := self.sp.size - sum(row.tokens for row in pack)) > 0:
            pack = [*pack, _filler(pack, missing)]
        documents = tuple(length for row in pack for length in row.documents)
        if self._chooses and documents not in self.sp.sharding.shards_of:
            self._place(self.costs.pack(documents, self.sizes))
        return self._joined(pack, documents)

    def _batch_of_whole(self, packs: list[list[Row]]) -> dict[str, Any]:
        """Return a batch of one row in which each rank holds the documents of one pack."""
        all_rows = [row for pack in packs for row in pack]
        packs = [pack or [_filler(all_rows, 1)] for pack in packs]
        placed = Pack.of_whole([[length for row in pack for length in row.documents] for pack in packs])
        self._place(placed)
        return self._joined([row for pack in packs for row in pack], placed.documents)

    def _joined(self, pack: list[Row], documents: tuple[int, ...]) -> dict[str, Any]:
        batch: dict[str, Any] = {name: torch.cat([row.tensors[name] for row in pack], 1) for name in pack[0].tensors}
        counted = torch.cat([torch.arange(n, device="cpu") for n in documents])[None]
        if not any(row.media for row in pack):
            return {**batch, "position_ids": counted}
        axes = max(len(row.positions) for row in pack if row.positions is not None)
        of_rows = counted.expand(axes, 1, -1).split([row.tokens for row in pack], 2)
        positions = [x if row.positions is None else row.positions for row, x in zip(pack, of_rows, strict=True)]
        batch |= self.packing.joined([row.media for row in pack])
        return {**batch, "position_ids": torch.cat(positions, 2) if axes > 1 else counted}

    @property
    def _chooses(self) -> bool:
        """Whether packs may have their own shards. False if the device mesh is already in use."""
        return len(self.sizes) > 1 and "device_mesh" not in vars(self.sp)

    def _place(self, pack: Pack) -> None:
        known = self.sp.sharding.shards_of
        known[pack.documents] = pack.shards
        if len(known) > REMEMBERED:
            del known[next(iter(known))]

    def _say_once(self, dealt: Dealt, costs: Sequence[float], shared: Sequence[tuple[int, ...]]) -> None:
        """Log the load balance in the first step and the number of bytes that ranks receive.

        The call is collective across all ranks.

        Args:
            dealt: The packs of the step.
            costs: The cost of each sample.
            shared: The documents in each pack that all ranks of this group share.
        """
        sp, cut, received = self.sp, 0, 0
        by_rank = [[*pack] for pack in zip(*dealt.whole[sp.data_rank], strict=True)] or [[]] * sp.size
        works = [sum(costs[sample] for pack in packs for sample in pack) for packs in by_rank]
        for documents in shared:
            placement = sp.place(sum(documents), documents)
            pack = Pack(documents, placement.shards, sp.sharding.ulysses(placement))
            of_cp_ranks = self.costs.works(pack)
            works = [work + of_cp_ranks[rank // pack.ulysses] / pack.ulysses for rank, work in enumerate(works)]
            cut += len(pack.cut)
            received += self.costs.received(documents, pack.ulysses, sp.rank)
        of_groups = [
            sum(costs[sample] for pack in (*packs, *itertools.chain(*whole)) for sample in pack)
            for packs, whole in zip(dealt.shared, dealt.whole, strict=True)
        ]
        bytes_most, count = maximum(sp.control_world, received, "bytes of packs"), sum(map(len, shared))
        count += sum(len(pack) for packs in by_rank for pack in packs)
        log_once(
            f"sequence_parallel: the first step's work, most over mean: {most(of_groups):.3f} over {len(of_groups)} "
            f"groups, {most(works):.3f} over the {len(works)} ranks of the first one; {cut} of its {count} documents "
            f"are cut ({cut / max(count, 1):.1%}); in attention a rank receives {bytes_most / 2**20:.3g} MiB at most"
        )
        self.has_said = True


class PackLoader(Loader):
    """A loader for this group's packs of each optimizer step. See `SequenceParallel.packs`."""

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
        """Move a batch to the device, except for inputs that specify document boundaries, which the host reads."""
        moved = {name: to_device(x, self.dealer.sp.device) for name, x in batch.items() if isinstance(x, Tensor)}
        return batch | {name: x for name, x in moved.items() if name not in READ}


def _model(sp: Any) -> Any:
    """Return the patched model, whose sizes determine costs.

    Raise ConfigError if packs would change the model's loss.
    """
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
    """Return the Ulysses sizes that packs may use.

    The result is only the configured size if no other size is possible.
    """
    config, sizes = sp.config, [sp.config.ulysses]
    why = {
        "the settings give it": not sp.ulysses_is_free,
        "device_mesh was given out": "device_mesh" in vars(sp),
        costs.fixed: costs.fixed != "",
    }
    if fixed := [reason for reason, holds in why.items() if holds]:
        log_once(f"sequence_parallel: all packs have ulysses {config.ulysses}, since {fixed[0]}")
        return sizes
    return sorted({*sizes, *costs.ulysses_sizes})


def _runtime(sp: Any, ulysses: int) -> Runtime:
    """Create a runtime with another Ulysses size and its own process groups.

    The call is collective across all ranks.
    """
    config, rank, world = dataclasses.replace(sp.config, ulysses=ulysses), dist.get_rank(), sp.control_world
    topology = config.topology(world.size())
    with explaining_failure("making process groups", world):
        made = groups.create(topology, rank, world, config.max_ctas, gloo_meets_hosts, of=sp.groups)
        dist.barrier(world)
    comm = TorchComm(made, explaining_failure)
    return Runtime(config, topology, made.cp_rank, comm, topology.index(rank, "ulysses"), of=sp.runtime)


def _filler(pack: Sequence[Row], tokens: int) -> Row:
    """Return a row of ignored tokens with the same tensors as a pack's rows."""
    filler = torch.zeros(1, tokens, dtype=torch.int64, device="cpu")
    kinds = pack[0].tensors if pack else {"input_ids": filler, "labels": filler}
    zeros = {name: x.new_zeros(1, tokens, *x.shape[2:]) for name, x in kinds.items()}
    return Row({**zeros, "labels": filler + IGNORE}, (tokens,))


def _digest(rows: Sequence[Row]) -> str:
    return str(Fingerprint.of(*(text for row in rows for text in fingerprint({**row.tensors, **row.media}).items())))


def _advice(by_rank: Any) -> str:
    return "give all ranks the same data set, in the same order: seed them alike"
