"""Forwards with a sharded cache: the first prompt, a further prompt, or a decode step.

Prompt tokens are sharded like an evaluation batch. The new tokens attend to one another with the configured schedule.
Attention to the cached tokens uses a ring of all ranks that share the sequence, in which either queries or keys travel.
The attention results for new and cached tokens are then merged. In a decode step, all ranks compute each row's new
token, and each rank attends to its own part of the cache. Layers that gather keys use the tensors gathered so far,
which every rank stores.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import InputError
from ds_seqpar.base.log import log_once
from ds_seqpar.base.on_devices import to_device
from ds_seqpar.core.compiler.sharding.layout import Run, Runs
from ds_seqpar.core.compiler.sharding.masks import FULL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards, runs_of_sp_rank
from ds_seqpar.core.runtime.admit import AttentionOptions
from ds_seqpar.core.runtime.kernels.accumulate import merge_
from ds_seqpar.core.runtime.operator import describe
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.data.inputs import InputSpec
from ds_seqpar.data.value_checks import ValueChecks
from ds_seqpar.operators.gathered import Piece
from ds_seqpar.operators.segments import Segments, segments_of

from .. import gathered_past
from ..gathered_past import Gather, Pieces
from ..graph_breaks import between_graphs
from ..inputs import POSITIONS, TABLE, with_axes
from ..look.facts import Facts, text_config
from ..sparse import INDEX, LATENT, StepSelection
from .cache import SERVES, Held, KeptRows, KeptTokens, Replica, Row, sharded, slices_of


@dataclasses.dataclass(kw_only=True, eq=False)
class CachedForward:
    """One forward with a sharded cache.

    Attributes:
        cache: The cache.
        kept: The record of tokens stored before this forward, updated by `end`.
        count: The number of rows.
        columns: The number of tokens of a row, including padding.
        positions: The position_ids for all ranks' tokens: int64 (rows, `tokens`) or (axes, rows, `tokens`).
        new: The number of real new tokens in each row of `rows`.
        real: (rows, columns) bool, on the CPU: whether each token so far is real. Trailing columns without padding may
            be missing. None if no column has padding.
        places: (rows, columns) int64: the index of each token among the row's real tokens, or -1 for padding. None
            without padding.
        rows: The record of tokens stored after this forward, set by `begin`.
        shards: Each SP rank's runs of a row's computed tokens; () in a decode step.
        layout: The layout of the new tokens, or None if tokens are divided equally among ranks.
    """

    cache: Any
    kept: KeptTokens
    count: int
    columns: int
    new: tuple[int, ...]
    places: Tensor | None
    real: Tensor | None
    positions: Tensor = dataclasses.field(init=False)
    rows: tuple[Row, ...] = ()
    shards: tuple[Runs, ...] = ()
    layout: BatchLayout | None = None
    order: Tensor | None = None  # (rows, tokens): the column of each computed token if there is padding
    logits: tuple[int, ...] | None = None  # the columns that get logits, or None for all
    # the number of calls of each layer's attention so far
    calls: Counter[int] = dataclasses.field(default_factory=Counter)
    made: dict[Any, Any] = dataclasses.field(default_factory=dict)  # values that layers with the same mask share

    @property
    def is_decode(self) -> bool:
        return self.columns == 1

    @property
    def tokens(self) -> int:
        """The number of computed tokens per row.

        The number is the length of the longest row, or at least `sp.multiple` in padded prompts.
        """
        return self.columns if self.places is None else max(self.kept.sp.multiple, *self.new)

    def held_columns(self) -> Tensor:
        """Return the columns of this rank's tokens in the cache: (rows or 1, local tokens)."""
        held = self.kept.sp.sharding.held(self.tokens, self.layout, self.kept.sp.rank)
        return self.kept.columns + (held[None] if self.order is None else self.order[:, held])

    def mask_of_keys(self) -> Tensor:
        """Return the mask of all real tokens so far: (rows, tokens of the longest row)."""
        longest = max(row.tokens for row in self.kept.rows) + self.tokens
        return torch.ones(self.count, longest, dtype=torch.long, device=self.positions.device)

    # ---- outputs

    def picked(self, columns: Sequence[int]) -> tuple[int, ...]:
        """Return the indices, counted without padding, of all rows' tokens in the given columns."""
        if self.places is None:
            return tuple(columns)
        return tuple(place for place in self.places[:, list(columns)].unique().tolist() if place >= 0) or (0,)

    def with_padding(self, x: Tensor, columns: Sequence[int] | None = None) -> Tensor:
        """Return an output with zeros inserted for padding.

        Args:
            x: The whole output (rows, tokens, ...), or only the tokens from `picked` if `columns` is given.
            columns: The columns of the output, or None for all columns.
        """
        if self.places is None:
            return x
        places = self.places
        if columns is not None:
            chosen = places[:, list(columns)]
            places = torch.searchsorted(torch.tensor(self.picked(columns), device="cpu"), chosen).masked_fill(
                chosen < 0, -1
            )
        places = places.to(x.device).view(*places.shape, *[1] * (x.dim() - 2))
        return x.gather(1, places.clamp(min=0).expand(-1, -1, *x.shape[2:])).masked_fill(places < 0, 0)

    # ---- cached tokens

    def begin(self, layout: BatchLayout | None = None) -> None:
        """Assign the new tokens to ranks according to the layout."""
        sp, kept = self.kept.sp, self.kept
        runs: tuple[Runs, ...] = tuple((Run(0, 1, 1),) * (rank == kept.turn % sp.size) for rank in range(sp.size))
        if not self.is_decode:
            even = EvenShards(sp.config.layout, self.tokens, sp.size // sp.config.ulysses)
            shards = even if layout is None else layout.shards
            runs = self.shards = tuple(runs_of_sp_rank(shards, "q", sp.config.ulysses, rank) for rank in range(sp.size))
            self.layout = layout
        before = kept.rows if len(kept.rows) == len(self.new) else kept.rows * len(self.new)
        self.rows = tuple(row.with_new(runs, count) for row, count in zip(before, self.new, strict=True))

    def end(self) -> None:
        """Record the forward's tokens as stored."""
        kept = self.kept
        kept.rows, kept.columns, kept.count, kept.running = self.rows, kept.columns + self.columns, self.count, False
        kept.turn, kept.real = kept.turn + self.is_decode, self.real
        if not self.is_decode:
            kept.inner = []
            replicas = [x for layer in self.cache.layers for x in layer.held if isinstance(x, Replica)]
            if replicas:
                size = sum(x.bytes_per_token for x in replicas)
                log_once(
                    f"sequence_parallel: past_key_values of {len(replicas)} layers that gather keys is whole on each "
                    f"rank, {size:,.0f} bytes a token"
                )

    # ---- attention

    @between_graphs
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        chunk: int | None,
        masks: Sequence[Mask] = (),
    ) -> Tensor:
        """Compute one attention call of a layer and store its keys and values.

        Args:
            layer: The index of the layer.
            q: The queries of this rank's tokens, or of the new token in a decode step: (rows, tokens, heads, head_dim).
            k: Keys with the shape of q, but with kv_heads heads.
            v: Values with the shape of k.
            options: The attention options, with a mask that is causal or has the layer's window.
            chunk: The chunk length of chunked attention, or None without chunks.
            masks: Each row's mask among its new tokens, for masks with blocks.
        """
        given = self._held(layer, Held), q, k, v, options, chunk
        with torch.no_grad():
            out = self._decode(*given) if self.is_decode else self._prefill(*given, masks)
        if not torch.is_grad_enabled():
            return out
        return _WithoutGradient.apply(out, q, k, v)

    def _held(self, layer: int, make: Callable[[], Any]) -> Any:
        """Return the stored tensors for the layer's next attention call."""
        held, number = self.cache.layers[layer].held, self.calls[layer]
        self.calls[layer] += 1
        if number == len(held):
            held.append(make())
        return held[number]

    def gathered(self, call: Pieces, of_ranks: Sequence[Sequence[Piece]] = (), gather: Gather = list) -> Any:
        """Run a module that gathers keys, and store the gathered tensors.

        Args:
            call: The module's call, with this rank's tokens, or the new tokens in a decode step.
            of_ranks: The pieces of each rank's tokens.
            gather: A function that gathers each rank's tensors into tensors of all new tokens.
        """
        make = functools.partial(Replica, gathered_past.rate_of(call.module))
        replica: Replica = self._held(call.layer, make)

        def run(part: Pieces, rows: slice, row: Row) -> Any:
            kept = KeptRows(replica, rows, self.count, row.tokens, self.tokens)
            if self.is_decode:
                return gathered_past.in_step(part, kept)
            pieces = self._pieces(of_ranks, row)
            return gathered_past.in_pieces(part, pieces, gather, max(map(len, of_ranks)), kept)

        output = self._by_row(call, run)
        replica.drop([row.tokens for row in self.rows], call.window)
        return output

    def selected(self, call: Pieces, of_ranks: Sequence[Sequence[Piece]] = ()) -> Any:
        """Run a module that selects latents with an index. Each rank stores the latents and index keys of its own
        tokens.

        Args:
            call: See `gathered`.
            of_ranks: See `gathered`.
        """
        held = {what: self._held(call.layer, Held) for what in (LATENT, INDEX)}
        sp, taken = self.kept.sp, {LATENT: list[Tensor](), INDEX: list[Tensor]()}
        peers = sp.runtime.one_ring

        def store(what: str, x: Tensor) -> None:
            x = x[:, :, None]
            held[what].store(x, x[..., :0], self.kept, self.rows, [0] * len(self.rows))

        def step(what: str, x: Tensor) -> Tensor:
            store(what, x)
            return held[what].part(slice(None), 0, max(counts))[0][:, :, 0]

        def run(part: Pieces, rows: slice, row: Row) -> Any:
            def keep(what: str, x: Tensor) -> Tensor:
                taken[what].append(x)
                old = held[what].part(rows, 0, row.kept(sp.rank))[0][:, :, 0] if row.tokens else x[:, :0]
                return gathered_past.gather_agreed(sp, peers, [torch.cat([old, x], 1)], self._segments(row))[0]

            return gathered_past.at_once(part, self._pieces(of_ranks, row), list, keep)

        if self.is_decode:
            counts = [row.kept(sp.rank) for row in self.rows]
            longest = max(row.tokens for row in self.kept.rows)
            selection = StepSelection(peers, counts, longest, step)
            return self._without_gradient(call, lambda: gathered_past.selected(call, selection))
        output = self._by_row(call, run, fill=torch.iinfo(torch.int32).max)
        for what, xs in taken.items():
            if xs:
                store(what, torch.cat(xs))
        return output

    def _pieces(self, of_ranks: Sequence[Sequence[Piece]], row: Row) -> list[Piece]:
        """Return this rank's pieces, shifted by the number of tokens already in the row."""
        return [piece._replace(start=piece.start + row.tokens) for piece in of_ranks[self.kept.sp.rank]]

    def _segments(self, row: Row) -> Segments:
        """Return the segments for a row's earlier and new tokens."""
        if row not in self.made:
            whole = row.with_new(self.shards, self.tokens)
            self.made[row] = segments_of(UnevenShards([_apart(runs) for runs in whole.runs]), (), None)
        return self.made[row]

    def _by_row(self, call: Pieces, run: Callable[[Pieces, slice, Row], Any], fill: int | None = None) -> Any:
        """Run a module on all rows at once if the rows have equal lengths, and row by row otherwise."""
        before = self.kept.rows

        def run_all() -> Any:
            parts = [call] if len(before) == 1 else map(call.of_rows, slices_of(before))
            return gathered_past.of_all_rows([*map(run, parts, slices_of(before), before)], fill)

        return self._without_gradient(call, run_all)

    def _without_gradient(self, call: Pieces, run: Callable[[], Any]) -> Any:
        with torch.no_grad():
            output = run()
        if not torch.is_grad_enabled():
            return output
        first, *others = output if isinstance(output, tuple | list) else (output,)
        first = _WithoutGradient.apply(first, call.inputs[call.states])
        return type(output)([first, *others]) if isinstance(output, tuple | list) else first

    def _decode(
        self, held: Held, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, chunk: int | None
    ) -> Tensor:
        sp, key = self.kept.sp, (options.mask.window, chunk)
        if key not in self.made:
            seen = [_first_seen(*key, row.tokens - new) for row, new in zip(self.rows, self.new, strict=True)]
            ranges = [(row.kept_before(sp.rank, a), row.kept(sp.rank)) for row, a in zip(self.rows, seen, strict=True)]
            first, end = min(a for a, _ in ranges), max(b for _, b in ranges)
            counts = None if len(ranges) == 1 else [(a - first, b - first) for a, b in ranges]
            self.made[key] = seen, first, end, counts
        seen, first, end, counts = self.made[key]
        held.store(k, v, self.kept, self.rows, seen)
        keys, values = held.part(slice(None), first, end)
        return sp.decode_attention(
            q, keys, values, counts=counts, scale=options.scale, softcap=options.softcap, sinks=options.sinks,
            agreed=True,
        )  # fmt: skip

    def _prefill(
        self, held: Held, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, chunk: int | None,
        masks: Sequence[Mask],
    ) -> Tensor:  # fmt: skip
        sp, window, kept = self.kept.sp, options.mask.window, self.kept
        out = self._among_new(q, k, v, options, chunk, masks)
        if kept.columns:
            (out, lse), dtype = out, q.dtype
            out = out.to(lse.dtype)
            for rows, row in zip(slices_of(kept.rows), kept.rows, strict=True):
                first = _first_seen(window, chunk, row.tokens)
                if first < row.tokens:
                    keys, values = held.part(rows, row.kept_before(sp.rank, first), row.kept(sp.rank))
                    mask, shards = self._to_kept(row, first, window, chunk)
                    scores = {"scale": options.scale, "softcap": options.softcap}
                    part = sp.cache_attention(q[rows], keys, values, mask=mask, shards=shards, **scores, agreed=True)
                    merge_(out[rows], lse[rows], *part)
            out = out.to(dtype)
        held.store(k, v, kept, self.rows, [_first_seen(window, chunk, row.tokens) for row in self.rows])
        return out

    def _among_new(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, chunk: int | None, masks: Sequence[Mask]
    ) -> Any:
        """Compute attention among the new tokens, and its log-sum-exp if there are earlier tokens."""
        kept, shards = self.kept, self.layout.shards if self.layout is not None else None
        options = options._replace(lse=kept.columns > 0, shards=shards)
        if chunk is not None:  # each row's chunks may start at different positions
            starts = [row.tokens % chunk for row in kept.rows]
            masks = [Mask(documents=(0, *range(chunk - start, self.tokens, chunk))) for start in starts]
        masks = masks or [options.mask]
        if len({*masks}) == 1:
            return kept.sp.attention_agreed(q, k, v, options._replace(mask=masks[0]))
        parts = [
            kept.sp.attention_agreed(q[i : i + 1], k[i : i + 1], v[i : i + 1], options._replace(mask=mask))
            for i, mask in enumerate(masks)
        ]
        return tuple(map(torch.cat, zip(*parts, strict=True))) if options.lse else torch.cat(parts)

    def _to_kept(self, row: Row, first: int, window: int | None, chunk: int | None) -> tuple[Mask, UnevenShards]:
        """Return the mask and shards for attention to the cached tokens from `first` on.

        Positions are relative to `first`.
        """
        key = row, window, chunk
        if key not in self.made:
            start, kept = row.tokens - first, row.kept_from(first)
            queries = [[Run(run.start + start, run.step, run.length) for run in runs] for runs in self.shards]
            mask = FULL if window is None else Mask(window=window)
            if chunk is not None:
                mask = Mask(documents=tuple(range(0, start + self.tokens, chunk)))
            self.made[key] = mask, UnevenShards(tuple(map(tuple, queries)), kept, q_start=start)
        return self.made[key]


class _WithoutGradient(torch.autograd.Function):
    """The identity of attention's output. Backward raises InputError, since cached tokens have no gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        raise InputError(f"{SERVES} has no gradient; got a backward through one, leave use_cache out")


def _apart(runs: Runs) -> Runs:
    """Return the runs after splitting each strided run into single tokens."""
    tokens = (
        (run,) if run.step == 1 else [Run(run.start + i * run.step, 1, 1) for i in range(run.length)] for run in runs
    )
    return tuple(itertools.chain.from_iterable(tokens))


def _first_seen(window: int | None, chunk: int | None, position: int) -> int:
    """Return the first position that the query at `position` sees."""
    if chunk is not None:
        return position - position % chunk
    return 0 if window is None else max(0, position - window + 1)


# ---- before a forward


def cached_forward(
    sp: SequenceParallel,
    config: Any,
    facts: Facts,
    inputs: Mapping[str, Any],
    checks: ValueChecks,
    table: Mapping[str, InputSpec],
) -> tuple[CachedForward, dict[str, Any]]:
    """Interpret the arguments of a forward with a cache, without communication.

    If a decode step's mask is on a device, the host does not wait for the mask. The new tokens are then assumed to be
    real, which is checked later.

    Args:
        sp: The SequenceParallel of the model.
        config: The model's config.
        facts: The model's facts.
        inputs: The forward's arguments by name.
        checks: An object that collects the values that ranks compare.
        table: The InputSpec of each argument.

    Returns:
        (the forward; its arguments with positions, but without cache, mask and padding).

    Raises:
        InputError: The cache or the mask does not match the forward.
    """
    if facts.uncached:
        raise InputError(
            f"{SERVES} that ranks share needs layers whose keys ranks keep in parts; got a model with "
            f"{facts.uncached}, say use_cache=False, or let each rank go on alone in "
            "hf_integration.whole_sequences(model)"
        )
    inputs = {name: x for name, x in inputs.items() if x is not None and name != "use_cache"}
    tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
    rows, columns = tokens.shape[:2]
    cache = inputs.pop("past_key_values", None)
    cache = DynamicCache(config=text_config(config)) if cache is None else cache
    kept = sharded(cache, config, sp)
    if kept.count not in (0, rows):
        raise InputError(f"{SERVES} needs as many rows as that has; got {rows} and one {kept}, begin a new one")
    all_real = _real_tokens(kept, inputs.pop("attention_mask", None), rows, columns, checks)
    new, places = (columns,) * len(kept.rows), None
    if all_real is not None:
        _check_inner_padding(kept, all_real, columns, config, facts)
    if all_real is not None and all_real.shape[1] > kept.columns:
        real = all_real[:, kept.columns :]
        new = tuple(real.sum(1).tolist())
        places = None if columns == 1 else (real.cumsum(1) - 1).masked_fill(~real, -1)
    elif 1 < columns < sp.multiple:
        places = torch.arange(columns, device="cpu").expand(rows, columns)
    own = (x for x in inputs if x == "labels" or (x in table and x not in TABLE and table[x].kind == "own"))
    if places is not None and (name := next(own, None)) is not None:
        raise InputError(
            f"{SERVES}, with padding or with fewer than {sp.multiple} tokens, takes no {name}; got some, leave it out"
        )
    given = inputs.pop("position_ids", None)
    positions = inputs.get(POSITIONS, given)
    if positions is None:
        positions = torch.arange(kept.columns, kept.columns + columns, device=tokens.device)[None]
        if not facts.counts_padding:
            before = to_device(torch.tensor([[row.tokens] for row in kept.rows], device="cpu"), tokens.device)
            counted = positions - kept.columns if places is None else places.clamp(min=0).to(tokens.device)
            positions = before + counted
        positions = positions + facts.first_position
    inputs[POSITIONS] = positions.expand(*positions.shape[:-2], rows, columns)
    table = with_axes(table, inputs)
    forward = CachedForward(cache=cache, kept=kept, count=rows, columns=columns, new=new, places=places, real=all_real)
    if places is not None:
        order = torch.argsort((places < 0).to(torch.int8), dim=1, stable=True)
        order = forward.order = functional.pad(order, (0, forward.tokens - columns))  # cut, or padded with 0
        inputs = {
            name: _compacted(x, order, table[name].dim) if name in table and table[name].kind == "tokens" else x
            for name, x in inputs.items()
        }
        if (is_media := inputs.get("visual_pos_masks")) is not None:  # dummy tokens have no media features
            real = torch.tensor(new, device="cpu")[:, None] > torch.arange(forward.tokens, device="cpu")
            inputs["visual_pos_masks"] = is_media & real.to(is_media.device)
    forward.positions = inputs[POSITIONS]
    return forward, inputs


def has_cache(inputs: Mapping[str, Any]) -> bool:
    """Return whether a forward's arguments include or request a cache."""
    given = inputs.get("past_key_values"), inputs.get("cache_params")
    return bool(inputs.get("use_cache")) or any(x is not None for x in given)


def takes_cache(module: torch.nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether a forward uses a cache, which training forwards never do."""
    return (
        has_cache(inputs) and inputs.get("shift_labels") is None and not (module.training and torch.is_grad_enabled())
    )


def _compacted(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """Return a tensor (..., rows, columns, ...) with each row's tokens reordered.

    Args:
        dim: The dim that contains the columns.
    """
    index = order.to(x.device).view(*[1] * (dim - 1), *order.shape, *[1] * (x.dim() - dim - 1))
    return x.take_along_dim(index, dim)


def _real_tokens(kept: KeptTokens, mask: Any, rows: int, columns: int, checks: ValueChecks) -> Tensor | None:
    """Return a mask of the real tokens so far, as in `CachedForward.real`, or None if all tokens are real.

    Raises:
        InputError: The mask has the wrong shape, or differs from the masks of earlier forwards.
    """
    wanted = rows, kept.columns + columns
    if mask is None and kept.real is None:
        return None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != wanted:
        raise InputError(
            f"{SERVES} needs the attention_mask of all tokens, {wanted}, where some are padding; got {describe(mask)}"
        )
    if columns == 1 and kept.columns and not checks.reads(mask):
        padding = [kept.columns - row.tokens for row in kept.rows]
        expected = padding[0] if len(padding) == 1 else to_device(torch.tensor(padding, device="cpu"), mask.device)
        checks.require((mask == 0).sum(1) - expected, _padding_error)
        return kept.real
    real = mask.cpu() != 0
    before = real[:, : kept.columns]
    if not before.equal(_to_columns(kept.real, before)):
        raise InputError(
            f"{SERVES} needs an attention_mask that begins as before; got one with other padding in its first "
            f"{kept.columns} columns, begin a new cache"
        )
    return None if kept.real is None and bool(real.all()) else real


def _to_columns(real: Tensor | None, like: Tensor) -> Tensor:
    """Pad `real` with True to as many columns as `like` has."""
    if real is None:
        return torch.ones_like(like)
    return functional.pad(real, (0, like.shape[1] - real.shape[1]), value=True)


def _padding_error(wrong: list[int]) -> InputError | None:
    if not any(wrong):
        return None
    return InputError(
        f"{SERVES} needs, in a decode step, an attention_mask that begins as before and has no padding in its new "
        f"column; got another one in row {[*map(bool, wrong)].index(True)} of an earlier step, begin a new cache, and "
        "pass masks on the CPU where new tokens are padding"
    )


def _check_inner_padding(kept: KeptTokens, real: Tensor, columns: int, config: Any, facts: Facts) -> None:
    """Raise InputError if a row has padding between its tokens and is longer than a window or chunk.

    Models include padding between tokens in the lengths of windows and chunks.
    """
    whole = kept.columns + columns
    shortest = min((getattr(text_config(config), name, None) or whole for _, name in facts.masks), default=whole)
    if shortest >= whole:
        return
    if real.shape[1] == whole:
        inner, tokens = _inner_padding(real), real.sum(1).tolist()
    else:  # a decode step
        kept.inner = kept.inner or _inner_padding(functional.pad(real, (0, 1), value=True))
        inner, tokens = kept.inner, [row.tokens + columns for row in kept.rows]
    if any(between and between + count > shortest for between, count in zip(inner, tokens, strict=True)):
        raise InputError(
            f"{SERVES} of a model with windows or chunks of {shortest} tokens needs rows without padding between "
            "their tokens; got an attention_mask with some, put all padding of a row before it"
        )


def _inner_padding(real: Tensor) -> list[int]:
    """Return the number of padding columns between the tokens of each row."""
    places = torch.arange(real.shape[1], device="cpu").expand_as(real)
    first, last = places.masked_fill(~real, real.shape[1]).amin(1), places.masked_fill(~real, -1).amax(1)
    return (last + 1 - first - real.sum(1)).clamp(min=0).tolist()
