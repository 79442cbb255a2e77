"""A sharded cache: each rank stores the keys and values of its own tokens.

`past_key_values` remains a transformers DynamicCache, but its layers are replaced by `ShardedLayer`s. All layers share
one `KeptTokens`, which records the number of tokens in each row and the rank that stores each token. A layer stores the
keys and values that its attention received, for all key/value heads. Each rank therefore stores 1/size of the tokens,
for any schedule and any Ulysses size. Layers that gather keys store the gathered tensors for all tokens on every rank.

Rows with padding are compacted before sharding: a row's real tokens come first. Padding after the real tokens is
computed but never attended to. Rows can therefore have different numbers of tokens, and different numbers of keys on
each rank.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DummyLayer, DynamicLayer

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError, InputError
from ds_seqpar.core.compiler.sharding.layout import Run, Runs
from ds_seqpar.core.compiler.sharding.masks import between
from ds_seqpar.core.compiler.sharding.shards import length

from ..gathered_past import KEYS, Taken
from ..look.facts import text_config

ENTRIES = -1  # the tensor index under which compressed entries are stored
BLOCK = 256  # the capacity of a rank's buffers is a multiple of this number of tokens
SERVES = "a forward with a cache"


@dataclasses.dataclass(frozen=True)
class Row:
    """The tokens of one row and the SP rank that stores each token. Rows of equal length share one `Row`."""

    tokens: int  # also the position of the next token
    runs: tuple[Runs, ...]  # the runs of tokens on each SP rank, in ascending order

    def kept_before(self, rank: int, position: int) -> int:
        """Return the number of tokens before a position that a rank stores."""
        return sum(max(0, between(run, 0, position)[1][2]) for run in self.runs[rank])

    def kept(self, rank: int) -> int:
        return length(self.runs[rank])

    def kept_from(self, first: int) -> tuple[Runs, ...]:
        """Return each rank's runs of tokens from position `first` on, with positions relative to `first`."""
        cut = [[between(run, first, self.tokens)[1] for run in runs] for runs in self.runs]
        return tuple(tuple(Run(a - first, step, n) for a, step, n in runs if n > 0) for runs in cut)

    def with_new(self, runs: Sequence[Runs], tokens: int) -> Row:
        """Return the row extended by `tokens` tokens.

        Args:
            runs: Each rank's runs of tokens, with positions relative to the first new token.
            tokens: The number of new tokens.
        """
        new = [[between(run, 0, tokens)[1] for run in of_rank] for of_rank in runs]
        shifted = [[Run(a + self.tokens, step, n) for a, step, n in of_rank if n > 0] for of_rank in new]
        joined = tuple(_joined((*old, *more)) for old, more in zip(self.runs, shifted, strict=True))
        return Row(self.tokens + tokens, joined)


def slices_of(rows: Sequence[Row]) -> list[slice]:
    """Return the slice of the batch dimension for each `Row`."""
    return [slice(None)] if len(rows) == 1 else [slice(i, i + 1) for i in range(len(rows))]


def _joined(runs: Sequence[Run]) -> Runs:
    """Merge ascending runs that continue one another with equal steps, such as a rank's decoded tokens."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        step = 0 if last is None else last.step if last.length > 1 else run.start - last.start
        if last is not None and run.length == 1 and run.start == last.last + step:
            joined[-1] = Run(last.start, step, last.length + 1)
        else:
            joined.append(run)
    return tuple(joined)


class KeptTokens:
    """Record of the tokens that each rank stores in a cache. All ranks have equal copies of the record.

    Attributes:
        count: The number of rows.
        rows: One `Row` for all rows, or one `Row` per row if any row has had padding.
        columns: The number of tokens of a row, including padding.
        real: (rows, columns) bool, on the CPU: whether each token is real. Trailing columns without padding may be
            missing. None if no column has padding.
        inner: The number of padding columns between each row's tokens. Empty until counted.
        turn: The number of decoded tokens so far. Ranks take turns storing decoded tokens.
        order: A hash of all row reorderings and selections so far.
        running: Whether a forward has begun and not yet ended.
    """

    def __init__(self, sp: SequenceParallel, config: Any) -> None:
        self.sp, self.config = sp, config
        self.reset()

    def reset(self) -> None:
        self.count, self.columns, self.turn, self.order, self.running = 0, 0, 0, 0, False
        self.real: Tensor | None = None
        self.inner: list[int] = []
        self.rows: tuple[Row, ...] = (Row(0, ((),) * self.sp.size),)

    def __deepcopy__(self, memo: dict) -> KeptTokens:
        copied = copy.copy(self)
        memo[id(self)] = copied
        return copied

    def __str__(self) -> str:
        ragged = f" ({', '.join(str(row.tokens) for row in self.rows)})" if len(self.rows) > 1 else ""
        order = f", order {self.order}" if self.order else ""
        return f"of {self.count} rows of {self.columns} tokens{ragged}{order}" if self.count else "empty"

    def select(self, indices: Tensor) -> None:
        chosen = indices.tolist()
        self.count, self.order = len(chosen), hash((self.order, *chosen)) & 0xFFFF_FFFF
        self.real, self.inner = None if self.real is None else self.real[chosen], []
        if len(self.rows) > 1:
            self.rows = tuple(self.rows[i] for i in chosen)


class Held:
    """The keys and values of one attention call on this rank: (rows, kv_heads, capacity, head_dim).

    Windowed attention drops tokens that no later query sees, so this rank's first `first` tokens are missing.
    """

    def __init__(self) -> None:
        self.keys = self.values = torch.empty(0)
        self.first = 0

    def store(self, k: Tensor, v: Tensor, before: KeptTokens, after: Sequence[Row], lowest: Sequence[int]) -> None:
        """Store new tokens, and drop the tokens before each row's position given by `lowest`.

        Args:
            k: The keys (rows, new tokens, kv_heads, head_dim), with real tokens first in each row.
            v: The new tokens' values.
            before: The record of tokens stored before the call.
            after: The record of tokens stored after the call.
            lowest: The first position that later queries see, for each row in `after`.
        """
        rank = before.sp.rank
        old, new = [row.kept(rank) for row in before.rows], [row.kept(rank) for row in after]
        if len(old) < len(new):
            old = old * len(new)
        first = min(row.kept_before(rank, position) for row, position in zip(after, lowest, strict=True))
        first = max(self.first, first)
        capacity, known = max(new) - first, self.keys.dim() == 4
        # growing by a quarter lets the allocator reuse a freed buffer for the next layer's slightly larger buffer
        capacity = -(-(capacity + capacity // 4 * known) // BLOCK) * BLOCK
        fits = known and max(new) - self.first <= self.keys.shape[2]
        frozen = self.keys.is_inference() and not torch.is_inference_mode_enabled()  # writable only in inference mode
        if not fits or frozen or first - self.first >= BLOCK:
            self.keys, self.values = (
                self._moved(kept, x, capacity, first, max(old)) for kept, x in ((self.keys, k), (self.values, v))
            )
            self.first = first
        for rows, a, b in zip(slices_of(after), old, new, strict=True):
            skipped = max(0, self.first - a)  # tokens of a long prompt that no window sees anymore
            if b - a > skipped:
                place = slice(a + skipped - self.first, b - self.first)
                self.keys[rows, :, place] = k[rows, skipped : b - a].transpose(1, 2)
                self.values[rows, :, place] = v[rows, skipped : b - a].transpose(1, 2)

    def _moved(self, kept: Tensor, x: Tensor, capacity: int, first: int, count: int) -> Tensor:
        """Return a new buffer for x's heads that contains this rank's stored tokens from `first` on."""
        moved = x.new_empty(x.shape[0], x.shape[2], capacity, x.shape[3])
        if kept.dim() == 4 and count > first:
            moved[:, :, : count - first] = kept[:, :, first - self.first : count - self.first]
        return moved

    @property
    def count(self) -> int:
        return self.keys.shape[0]

    def part(self, rows: slice, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a range of this rank's tokens: (rows, tokens, kv_heads, head_dim)."""
        place = slice(max(0, first - self.first), max(0, end - self.first))
        return tuple(x[rows, :, place].transpose(1, 2) for x in (self.keys, self.values))  # type: ignore[return-value]

    def select(self, indices: Tensor) -> None:
        if self.keys.dim() == 4:
            self.keys, self.values = (x.index_select(0, indices.to(x.device)) for x in (self.keys, self.values))


class Replica:
    """A module's cached tensors (rows, capacity, ...), by name. Every rank stores all tokens.

    Args:
        rate: The number of tokens that the module compresses into one entry, or 0 if it does not compress.

    Attributes:
        kept: The stored tensors, and the compressed entries.
        first: The first token whose values are still stored, by name.
    """

    def __init__(self, rate: int = 0) -> None:
        self.kept: Taken = {}
        self.first: dict[tuple[str, int], int] = {}
        self.rate = rate

    @property
    def count(self) -> int:
        return len(next(iter(self.kept.values()), ()))

    @property
    def bytes_per_token(self) -> float:
        """The number of bytes that each additional token of a row requires."""
        return sum(
            x.element_size() * x.shape[2:].numel() / (self.rate if name[1] == ENTRIES else 1)
            for name, x in self.kept.items()
            if name not in self.first
        )

    def write(self, name: tuple[str, int], x: Tensor, rows: slice, count: int, at: int) -> Tensor:
        """Store x (rows, n, ...) in the given rows from index `at` on.

        Return the rows' stored values up to the end of x.
        """
        end, kept = at + x.shape[1], self.kept.get(name)
        frozen = kept is not None and kept.is_inference() and not torch.is_inference_mode_enabled()
        if kept is None or kept.shape[1] < end or frozen:
            self.kept[name] = self._moved(x.new_empty(count, 0, *x.shape[2:]) if kept is None else kept, end)
        self.kept[name][rows, at:end] = x
        return self.kept[name][rows, :end]

    def drop(self, tokens: Sequence[int], window: int | None) -> None:
        """Drop keys before the window and values already compressed into entries, which later tokens do not need.

        Args:
            tokens: The number of tokens of each row.
            window: The number of tokens that a query sees, or None if it sees all tokens.
        """
        compressed = {name for name, number in self.kept if number == ENTRIES}
        for name, number in [*self.kept]:
            if name == KEYS and window is not None:
                token = min(tokens) - window + 1
            elif name in compressed and number != ENTRIES:
                token = (min(tokens) // self.rate - 1) * self.rate
            else:
                continue
            key, first = (name, number), self.first.setdefault((name, number), 0)
            if token - first >= BLOCK:
                kept = self.kept[key][:, token - first : max(tokens) - first]
                self.kept[key], self.first[key] = self._moved(kept, kept.shape[1]), token

    @staticmethod
    def _moved(kept: Tensor, places: int) -> Tensor:
        """Return a copy of the buffer with room for `places` tokens.

        A buffer that grows gets a quarter more capacity than it needs.
        """
        grown = places + places // 4 if kept.shape[1] else places
        moved = kept.new_empty(kept.shape[0], -(-grown // BLOCK) * BLOCK, *kept.shape[2:])
        moved[:, : kept.shape[1]] = kept
        return moved

    def select(self, indices: Tensor) -> None:
        self.kept = {name: x.index_select(0, indices.to(x.device)) for name, x in self.kept.items()}


class KeptRows:
    """A view of a `Replica` for rows with the same number of tokens, which implements `gathered_past.Kept`.

    Args:
        replica: The replica of the module.
        rows: The slice of the batch's rows.
        count: The number of rows in the batch.
        before: The number of tokens already in these rows.
        new: The number of new tokens.
    """

    def __init__(self, replica: Replica, rows: slice, count: int, before: int, new: int) -> None:
        self.replica, self.rows, self.count, self.before, self.tokens = replica, rows, count, before, before + new
        self.first, self.known = replica.first, before // replica.rate if replica.rate else 0
        kept = ((name, x) for (name, number), x in replica.kept.items() if number == ENTRIES)
        self.entries = {name: x[rows, : self.known] for name, x in kept}

    def store(self, new: Taken) -> Taken:
        return {
            name: self.replica.write(name, x, self.rows, self.count, self.before - self.first.get(name, 0))
            for name, x in new.items()
        }

    def store_entries(self, entries: Mapping[str, Tensor]) -> None:
        for name, x in entries.items():
            new = x[:, self.known :]
            self.entries[name] = self.replica.write((name, ENTRIES), new, self.rows, self.count, self.known)


class ShardedLayer(CacheLayerMixin):
    """A layer of a sharded cache. Attention stores the keys and values itself, so `update` stores nothing."""

    def __init__(self, kept: KeptTokens, is_first: bool) -> None:
        super().__init__()
        self.kept, self.is_first, self.is_initialized = kept, is_first, True
        self.held: list[Held | Replica] = []  # one for each attention call in the layer, in call order

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.kept.running:
            raise InputError(
                "a cache that ranks filled together serves the model that they share; got a forward of a rank by "
                "itself, begin a new cache for it"
            )
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.kept.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.kept.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.held = []
        if self.is_first:
            self.kept.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        self._select(lambda rows: rows[indices.cpu() if isinstance(indices, Tensor) else indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda rows: rows.repeat_interleave(repeats))

    def _select(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Keep only the rows that `choose` selects."""
        if self.held:  # another layer's rows may already have changed
            chosen = choose(torch.arange(max(held.count for held in self.held), device="cpu"))
            for held in self.held:
                held.select(chosen)
            if self.is_first:
                self.kept.select(chosen)

    def crop(self, tokens_to_remove: int) -> None:
        raise ConfigError("a cache in parts loses no tokens again; got crop, copy.deepcopy the cache before it grows")

    def offload(self) -> None:
        raise ConfigError("a cache in parts stays on its device; got a cache with offloading=True, leave that out")


def kept_of(cache: object) -> KeptTokens | None:
    """Return the KeptTokens of a sharded cache, or None for any other object."""
    layers = getattr(cache, "layers", None) or [None]
    return layers[0].kept if isinstance(layers[0], ShardedLayer) else None


def sharded(cache: Any, config: Any, sp: SequenceParallel) -> KeptTokens:
    """Return the KeptTokens of a cache, after replacing the layers if the cache is an empty DynamicCache.

    Raises:
        InputError: The cache has an unsupported type, or was filled by a single rank or with another SequenceParallel.
    """
    if (kept := kept_of(cache)) is not None:
        if kept.sp is not sp:
            raise InputError(f"{SERVES} needs one of its own SequenceParallel; got one of another, begin a new one")
        if kept.config is not config and kept.config.to_dict() != config.to_dict():
            raise InputError(f"{SERVES} needs one of its own model; got that of another model, begin a new one")
        if kept.running:
            raise InputError(f"{SERVES} needs one whose last forward ended; got one that failed, begin a new one")
        return kept
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        got = "one with offloading=True" if type(cache) is DynamicCache else type(cache).__name__
        raise InputError(f"{SERVES} that ranks share needs a DynamicCache; got {got}, leave past_key_values out")
    if strange := [type(layer).__name__ for layer in cache.layers if not isinstance(layer, DynamicLayer | DummyLayer)]:
        raise InputError(f"{SERVES} that ranks share needs layers that attend; got a {strange[0]}")
    if any(getattr(layer, "is_initialized", False) for layer in cache.layers if isinstance(layer, DynamicLayer)):
        raise InputError(
            f"{SERVES} that ranks share needs one that they filled together, or an empty one; got one of "
            f"{cache.get_seq_length()} tokens that this rank filled by itself, go on with it in "
            "hf_integration.whole_sequences(model)"
        )
    kept, count = KeptTokens(sp, config), max(len(cache.layers), text_config(config).num_hidden_layers)
    cache.layers[:] = [ShardedLayer(kept, is_first=not index) for index in range(count)]
    cache.layer_class_to_replicate = None
    return kept
