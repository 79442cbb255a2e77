"""Run unmodified attention modules on a rank's tokens as if the tokens followed a cache of all earlier tokens.

Modules that select keys with an index, or that have custom attention, read earlier tokens from a cache. Each of these
modules therefore gets a `GatheredPast` as its cache, and runs twice on each piece of a rank's tokens. In the first run
the piece attends only to itself, and the cache records the module's keys. All ranks then gather the keys. In the second
run the cache returns the keys of the piece's document, up to the piece's last token. A piece is short, and its second
run is recomputed in backward, so memory grows with the piece's length times the number of tokens.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_seqpar import SequenceParallel
from ds_seqpar.base.compat import graph_task
from ds_seqpar.base.errors import ConfigError, InputError, SeqParError, as_seqpar_error
from ds_seqpar.core.runtime.runtime import Runtime
from ds_seqpar.operators.gathered import NAME, Piece, gather, pieces_of, segments
from ds_seqpar.operators.segments import Segments
from ds_seqpar.operators.states import Tied

from . import sparse
from .compat import ATTENTION, attention_name
from .context import KEYWORD, ForwardContext, current
from .families import name_before
from .graph_breaks import between_graphs
from .module_patch import is_overridden, override, patched

CACHES = ("past_key_values", "layer_past")  # names of the cache argument
BY_KEY, PER_HEAD = "alibi", "position_bias"  # names of arguments that have no query dim
WHOLE = BY_KEY, PER_HEAD
SHARED = "shared_kv_states"  # the name of the argument through which layers share keys
KEYS = "keys"  # the name under which a module's keys and values are recorded
CONVOLUTION = "convolution "  # prefix in the names of convolutions whose outputs may be used to compute keys
POOLS = "compress_ratio"  # an attribute of indexers that rotate compressed keys by position
LAYER = "a layer that gathers keys"  # for error messages
NUMBERS = ("position_ids", "prev_topk_indices")  # names of arguments with positions or indices of keys
ROWS = 256  # number of tokens that a module computes at a time

Inputs = dict[str, Any]
Taken = dict[tuple[str, int], Tensor]  # (name, tensor index) -> (B, tokens, ...)


class Kept(Protocol):
    """Interface to this rank's cached tensors for some rows.

    Attributes:
        tokens: The number of tokens, including the new tokens.
        first: The first token whose values are still stored, by name. Missing names start at token 0.
        entries: The entries into which the module has compressed tokens, by name (B, entries, ...).
    """

    tokens: int
    first: dict[tuple[str, int], int]
    entries: dict[str, Tensor]

    def store(self, new: Taken) -> Taken:
        """Store the module's tensors for new tokens, and return all stored tensors with the same names."""
        ...

    def store_entries(self, entries: Mapping[str, Tensor]) -> None:
        """Store all entries compressed so far."""
        ...


class GatheredPast:
    """An object that a module uses as its cache, and as each layer of the cache.

    Args:
        module: The module.
        piece: The piece of tokens on which the module runs.
        gathered: The tensors (B, tokens, ...) gathered from all ranks, by (name, tensor index).
        is_alone: Whether the piece attends only to itself and the gathered tensors.
        kept: The cached tensors from earlier forwards, or None without a cache.
        stores: Whether to store new tensors, as in a decode step, in which no tensors are gathered.

    Attributes:
        taken: The piece's own tensors, keyed like `gathered`, in the order of the module's calls.
        entries: The entries into which the module has compressed the document's tokens, by name (B, entries, ...).
    """

    is_compileable = False

    def __init__(
        self,
        module: nn.Module,
        piece: Piece,
        gathered: Taken,
        is_alone: bool,
        kept: Kept | None = None,
        stores: bool = False,
    ) -> None:
        self.module, self.piece, self.gathered, self.kept, self.stores = module, piece, gathered, kept, stores
        self.before = 0 if is_alone else piece.start - piece.document
        self.taken: Taken = {}
        self.entries: dict[str, Tensor] = {}
        self.keys: Tensor | None = None

    def _all(self, what: str, *xs: Tensor, axis: int = -2, start: int = 0) -> list[Tensor]:
        """Record tensors (B, ..., tokens, ...).

        Return the document's gathered tensors up to the end of the piece, if available.

        Args:
            start: The first token needed.
        """
        found: list[Tensor] = []
        for number, x in enumerate(xs):
            key = what, number
            if number and x is xs[0]:
                found.append(found[0])
                continue
            self.taken[key] = x.movedim(axis, 1)
            if self.kept is not None and self.stores:
                self.gathered |= self.kept.store({key: self.taken[key]})
            if key in self.gathered:
                first = 0 if self.kept is None else self.kept.first.get(key, 0)  # earlier tokens were dropped
                begin = max(self.piece.document + start, first)
                x = self.gathered[key][:, begin - first : self.piece.end - first].movedim(1, axis).contiguous()
            found.append(x)
        return found

    def all_positions(self, *embeddings: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._all("positions", *embeddings))

    def __getitem__(self, layer: int) -> GatheredPast:
        return self

    @property
    def layers(self) -> GatheredPast:
        return self

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._all(KEYS, key_states, value_states)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor, *args: Any) -> Tensor:
        return self._all("index", indexer_key_states)[0]

    update_index = update_indexer

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return all complete compression windows.

        Each piece compresses all windows again, because ranks gather the inputs of compression. If entries are cached,
        only the last cached window is compressed again, because the next entry depends on it.
        """
        rate = rate_of(self.module)
        known = None if self.kept is None else self.kept.entries.get(name)
        self.known = None if known is None else known[:, : (self.piece.end - self.piece.document) // rate]
        skipped = 0 if self.known is None else max(0, self.known.shape[1] - 1)
        kv, gate = self._all(name, kv, gate, start=skipped * rate)
        self.windows = kv.shape[1] // rate
        # return a window of padding, since later modules must run for ZeRO-3 to gather parameters on all ranks
        if not self.windows:
            kv, gate = (F.pad(x, (0, 0, 0, rate - x.shape[1])) for x in (kv, gate))
            return kv, gate, 0
        return kv[:, : self.windows * rate], gate[:, : self.windows * rate], skipped * rate

    def update_overlap_state(self, *args: Any) -> tuple[None, None]:
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        compressed = compressed[:, : self.windows]
        if self.known is not None and self.known.shape[1]:
            compressed = torch.cat([self.known, compressed[:, 1:]], 1)
        self.entries[name] = compressed
        return compressed

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer: int = 0, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: Any
    ) -> Tensor:
        (states,) = self._all(f"{CONVOLUTION}{state_idx}", conv_states, axis=-1)
        return states[..., -(conv_kernel_size + conv_states.shape[-1]) :] if conv_kernel_size else states

    def get_seq_length(self, layer: int = 0) -> int:
        return self.before if self.keys is None else self.keys.shape[-2]

    def get_query_offset(self, layer: int = 0) -> int:
        return self.before

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        return self.before + query_length, 0


class _OfPiece(UserDict):
    """A dict through which layers share keys during one run of one piece."""

    def __init__(self, shared: Any, run: str) -> None:
        super().__init__()
        self.shared, self.run = shared, run

    def __getitem__(self, key: str) -> Any:
        return self.shared[f"{key} {self.run}"]

    def __setitem__(self, key: str, value: Any) -> None:
        self.shared[f"{key} {self.run}"] = value


def cache_argument(module: nn.Module) -> str | None:
    """Return the name of a forward's cache argument, or None if the forward takes no cache."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHES if name in names), None)


def arguments(module: nn.Module, args: tuple, kwargs: Inputs) -> Inputs:
    """Return the arguments of a module's forward by name, in the order of its parameters."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given[name] for name in (*names, *given) if name in given}


def rate_of(module: nn.Module) -> int:
    """Return the number of tokens that a module compresses into one entry, or 0 if it does not compress."""
    rate: Any = next((m.compress_rate for m in module.modules() if hasattr(m, "compress_rate")), 0)
    return rate


def takes_keys(modules: Iterable[nn.Module]) -> bool:
    """Return whether any module takes `alibi`, which the model computes from a 2-dim mask of all keys."""
    return any("alibi" in inspect.signature(type(module).forward).parameters for module in modules)


# ---- a module on pieces


class Pieces:
    """A call of a module that can run on pieces of the tokens.

    Args:
        module: The module.
        window: The number of tokens that a query sees under the module's mask, or None if it sees all earlier tokens.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
    """

    def __init__(self, module: Any, window: int | None, args: tuple, kwargs: Inputs) -> None:
        self.module, self.window = module, window
        self.inputs, self.cache = arguments(module, args, kwargs), cache_argument(module) or ""
        self.states = next(name for name, x in self.inputs.items() if isinstance(x, Tensor))
        self.tokens = self.inputs[self.states].shape[1]

    @property
    def layer(self) -> int:
        return getattr(self.module, "layer_idx", None) or 0

    def with_one_more(self) -> Pieces:
        """Return the call with a dummy token appended, for ranks that need extra runs to match the other ranks."""
        more = copy.copy(self)
        more.tokens = self.tokens + 1
        more.inputs = {name: self._mapped(name, x, _extended) for name, x in self.inputs.items()}
        return more

    def of_rows(self, rows: slice) -> Pieces:
        """Return the call restricted to some rows of the batch."""
        count, some = self.inputs[self.states].shape[0], copy.copy(self)

        def cut(x: Any) -> Any:
            if isinstance(x, Mapping) and not isinstance(x, UserDict):
                return {name: cut(value) for name, value in x.items()}
            if isinstance(x, tuple | list):
                return type(x)(map(cut, x))
            if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[0] in (0, 1) or x.shape[0] % count:
                return x
            # alibi contains all heads of one row, followed by all heads of the next row
            return x.unflatten(0, (count, -1))[rows].flatten(0, 1)

        some.inputs = {name: x if name == PER_HEAD else cut(x) for name, x in self.inputs.items()}
        if (shared := some.inputs.get(SHARED)) is not None:
            some.inputs[SHARED] = _OfPiece(shared, f"of {rows}")
        return some

    def run(self, piece: Piece, run: str, past: GatheredPast | None = None, is_alone: bool = True) -> Any:
        """Run the module on a piece.

        Args:
            piece: The piece.
            run: The name of the run.
            past: The cache, or None to run without a cache.
            is_alone: Whether the piece attends only to itself.
        """
        kept = None if past is None else past.kept
        begin = piece.document if kept is None else max(piece.document, kept.first.get((KEYS, 0), 0))
        keys = piece.length if is_alone else piece.end - begin
        inputs: Inputs = {}
        for name, x in self.inputs.items():
            if name == SHARED:
                inputs[name] = _OfPiece(x, run)
            elif name == "attention_mask" and isinstance(x, Tensor) and x.dim() == 4:
                inputs[name] = self._mask(x, piece, keys)
            else:
                if name == BY_KEY and isinstance(x, Tensor):
                    x = x[..., begin - piece.document :][..., :keys]
                x = inputs[name] = self._mapped(name, x, lambda x, axis: x.narrow(axis, piece.place, piece.length))
                if is_alone and name in NUMBERS and isinstance(x, Tensor):
                    inputs[name] = self._from_zero(name, x)
        if past is not None:
            inputs[self.cache] = past
            if any(hasattr(module, POOLS) for module in self.module.modules()):
                rows = [x.expand(len(inputs[self.states]), -1, -1) for x in inputs["position_embeddings"]]
                inputs["position_embeddings"] = past.all_positions(*rows)
        return type(self.module).forward(self.module, **inputs)

    def _from_zero(self, name: str, x: Tensor) -> Tensor:
        """Renumber keys from 0 for a piece that attends only to itself."""
        if name != "position_ids":
            return torch.zeros_like(x)
        # without RoPE, position_ids only limit the keys that an index may select
        return x - x[..., :1] if self.inputs.get("position_embeddings") is not None else x

    def _mask(self, given: Tensor, piece: Piece, keys: int) -> Tensor:
        """Return a piece's mask in the form that eager attention or sdpa expects."""
        x = self.inputs[self.states]
        at = torch.arange(keys, device=x.device)
        distance = at[keys - piece.length :, None] - at
        visible = (distance >= 0) & (distance < (self.window or keys))
        visible = visible.expand(len(x), 1, -1, -1)
        config = getattr(self.module, "config", None)
        if config is not None and attention_name(config) == "sdpa":
            return visible
        low = torch.zeros(visible.shape, dtype=x.dtype, device=x.device).masked_fill(~visible, torch.finfo(x.dtype).min)
        return low if given.is_floating_point() else low.to(given.dtype)

    def _mapped(self, name: str, x: Any, function: Callable[[Tensor, int], Tensor]) -> Any:
        """Apply a function to the per-token tensors of an argument, passing each tensor's token axis."""
        if isinstance(x, Mapping) and not isinstance(x, UserDict):
            return {key: self._mapped(name, value, function) for key, value in x.items()}
        if isinstance(x, tuple | list):
            return type(x)(self._mapped(name, value, function) for value in x)
        if not isinstance(x, Tensor) or not x.dim() or name in WHOLE:
            return x
        axes = [x.dim() - 1] if name == "position_ids" else range(min(1, x.dim() - 1), min(3, x.dim()))
        axis = next((axis for axis in axes if x.shape[axis] == self.tokens), None)
        return x if axis is None else function(x, axis)


def _extended(x: Tensor, axis: int) -> Tensor:
    """Return x with a dummy token appended, in the same autograd graph."""
    shape = [1 if i == axis else n for i, n in enumerate(x.shape)]
    return torch.cat([x, x.new_ones(shape) if x.is_floating_point() else x.new_zeros(shape)], axis)


def joined(outputs: Sequence[Any], pieces: Sequence[Piece]) -> Any:
    """Join a module's outputs for several pieces into one output for all tokens.

    Attention weights are replaced with None.
    """
    if isinstance(outputs[0], tuple | list):
        return type(outputs[0])(joined(each, pieces) for each in zip(*outputs, strict=True))
    lengths = [piece.length for piece in pieces]
    if not isinstance(outputs[0], Tensor) or outputs[0].dim() < 2:  # such as a bias that the layer adds
        return outputs[0]
    if outputs[0].dim() != 3 or [x.shape[1] for x in outputs] != lengths:
        return None
    wide = _as_wide(outputs)
    return torch.cat(wide, 1) if len(wide) > 1 else wide[0]


def alone(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module on each token separately."""
    call = Pieces(module, None, args, kwargs)
    pieces = [Piece(place, 1, 0, 0) for place in range(call.tokens)]
    return joined([call.run(piece, f"alone {piece.place}") for piece in pieces], pieces)


Gather = Callable[[list[Tensor]], list[Tensor]]


def in_pieces(call: Pieces, pieces: Sequence[Piece], gather: Gather, count: int = 0, kept: Kept | None = None) -> Any:
    """Run a module on pieces of this rank's tokens as if each piece followed a cache.

    Args:
        call: The call.
        pieces: All pieces of the rank, in order.
        gather: A function that gathers tensors of local tokens (B, local tokens, ...) into tensors of all tokens.
        count: The largest number of pieces on any rank. ZeRO-3 gathers parameters in each run, so all ranks need the
            same number of runs.
        kept: An object that stores the gathered tensors, or None to store nothing.
    """
    tokens, mine, none = call.tokens, len(pieces), Taken()
    runs = [*pieces, *[Piece(call.tokens, 1, 0, 0)] * (count - mine)]
    if len(runs) > mine:
        call = call.with_one_more()
    gathered: Taken = {}
    is_first = is_left = True
    while is_left:
        pasts = [GatheredPast(call.module, x, gathered if n < mine else none, True) for n, x in enumerate(runs)]
        for number, past in enumerate(pasts):
            call.run(past.piece, f"{number} alone", past)
        keys = [key for key in pasts[0].taken if key not in gathered]
        convolutions = [key for key in keys if key[0].startswith(CONVOLUTION)] if is_first else []
        is_first, is_left = False, bool(convolutions)
        keys = convolutions or keys
        local = [torch.cat([past.taken[key] for past in pasts], 1)[:, :tokens] for key in keys]
        new = dict(zip(keys, gather(local), strict=True))
        gathered |= new if kept is None else kept.store(new)
    if kept is not None and rate_of(call.module):  # compress all tokens here, so that no piece must
        last = Piece(0, 1, kept.tokens - 1, 0)
        past = GatheredPast(call.module, last, gathered, False, kept)
        call.run(last, "entries", past, False)
        kept.store_entries(past.entries)

    def run(number: int) -> Any:
        is_none = number >= mine
        of = (none, True) if is_none else (gathered, False, kept)
        past = GatheredPast(call.module, runs[number], *of)
        return call.run(runs[number], str(number), past, is_none)

    computes_again = torch.is_grad_enabled() and len(runs) > 1
    outputs = [checkpoint(run, n, use_reentrant=False) if computes_again else run(n) for n in range(len(runs))]
    output = joined(outputs[:mine] or outputs[:1], pieces or runs[:1])
    rest = [x for out in outputs[mine:] for x in (out[:1] if isinstance(out, tuple | list) else [out])]
    tied = [x for x in (*rest, *gathered.values()) if x.requires_grad]  # backward communicates on every rank

    output = output if mine else _empty(output)
    if not isinstance(output, tuple | list):
        return Tied.apply(output, *tied) if tied else output
    first, *others = output
    return type(output)([Tied.apply(first, *tied) if tied else first, *others])


def in_step(call: Pieces, kept: Kept) -> Any:
    """Run a module on one new token, after all cached tokens."""
    piece = Piece(0, 1, kept.tokens - 1, 0)
    past = GatheredPast(call.module, piece, {}, False, kept, stores=True)
    output = joined([call.run(piece, "step", past, False)], [piece])
    kept.store_entries(past.entries)
    return output


def of_all_rows(outputs: Sequence[Any], fill: int | None = None) -> Any:
    """Join a module's outputs for single rows into the output for the whole batch.

    Args:
        outputs: The outputs of the rows, in order.
        fill: The value with which to pad rows that have fewer indices, or None to repeat a row's last index.
    """
    first = outputs[0]
    if isinstance(first, tuple | list):
        return type(first)(of_all_rows(x, fill) for x in zip(*outputs, strict=True))
    if not isinstance(first, Tensor) or first.dim() < 3 or len(outputs) == 1:
        return first
    return torch.cat(_as_wide(outputs, fill))


def _as_wide(outputs: Sequence[Tensor], fill: int | None = None) -> list[Tensor]:
    """Return outputs (B, s, W) padded to the same width. Rows with fewer tokens have narrower index outputs."""
    widest = max(x.shape[2] for x in outputs)
    fills = [x[..., -1:] if fill is None else x.new_full((*x.shape[:2], 1), fill) for x in outputs]
    return [torch.cat([x, y.expand(-1, -1, widest - x.shape[2])], 2) for x, y in zip(outputs, fills, strict=True)]


def at_once(call: Pieces, pieces: Sequence[Piece], gather: Gather, keep: sparse.Keep | None = None) -> Any:
    """Run a module that `sparse` supports on all of this rank's tokens at once.

    Args:
        call: See `in_pieces`.
        pieces: See `in_pieces`.
        gather: See `in_pieces`.
        keep: See `sparse.Selection`.
    """
    output = selected(
        call if pieces else call.with_one_more(),
        sparse.Selection(pieces or [Piece(0, 1, 0, 0)], gather, call.tokens, keep),
    )
    return output if pieces else _empty(output)


def selected(call: Pieces, selection: sparse.Selection) -> Any:
    """Run a module that `sparse` supports, with a selection as both its mask and its cache."""
    return sparse.run(call.module, {**call.inputs, "attention_mask": selection, call.cache: selection})


def _empty(output: Any) -> Any:
    """Return a module's output truncated to zero tokens."""
    if isinstance(output, tuple | list):
        return type(output)(map(_empty, output))
    return output[:, :0] if isinstance(output, Tensor) else output


# ---- in a patched model


@between_graphs
def _shared(sp: SequenceParallel, context: ForwardContext, call: Pieces) -> Any:
    layout, cached = context.layout, context.cached
    selecting = patched(call.module).selecting
    selects = len(selecting) > 0 and sparse.can_run(selecting)
    if cached is not None and cached.is_decode:
        return cached.selected(call) if selects else cached.gathered(call)
    if layout is not None and layout.mask.parents:
        raise InputError(
            f"layers that gather keys need documents without parents; got a layout with {layout.mask}, give each "
            "document a row of its own, behind copies of its parents"
        )
    of = (None, ()) if layout is None else (layout.shards, layout.mask.documents)
    runtime = sp.runtime_of(of[0])
    cut, peers = segments(runtime, call.tokens, *of), runtime.one_ring
    of_ranks = pieces_of(cut, ROWS)

    gather_all = functools.partial(gather_agreed, sp, peers, segments=cut)
    with _telling(sp, call.module):
        if cached is not None:
            return cached.selected(call, of_ranks) if selects else cached.gathered(call, of_ranks, gather_all)
        if selects:
            return at_once(call, of_ranks[peers.rank], gather_all)
        return in_pieces(call, of_ranks[peers.rank], gather_all, max(map(len, of_ranks)))


def gather_agreed(sp: SequenceParallel, peers: Runtime, xs: list[Tensor], segments: Segments) -> list[Tensor]:
    """Gather tensors with `operators.gathered.gather` after the ranks have agreed to gather."""
    alike = [(str(x.dtype), tuple(x.shape[2:]), x.requires_grad) for x in xs]
    sp.checker.check_deferred(NAME, {"tensors": alike}, call=LAYER)
    return gather(peers, xs, segments)


@contextlib.contextmanager
def _telling(sp: SequenceParallel, module: nn.Module) -> Iterator[None]:
    """Context manager that raises an error on all ranks if a module's forward fails on any rank.

    An error on one rank alone would leave the other ranks waiting for keys.
    """
    error, is_forward = None, graph_task() < 0
    try:
        yield
    except SeqParError:
        raise
    except Exception as reason:
        if not is_forward:  # a checkpoint stops recomputing early by raising
            raise
        error = as_seqpar_error(f"{type(module).__name__}, a layer that gathers keys, failed", reason)
    if is_forward:
        sp.checker.check_deferred(LAYER, {}, error=error, call=LAYER)


def check(modules: Iterable[nn.Module]) -> None:
    """Raise ConfigError for modules that override their forward, take no cache, or use unsupported attention."""
    for module in modules:
        if "forward" in vars(module) and not is_overridden(module, "forward"):
            raise ConfigError(
                "layers that gather keys need the forward of their class; got a "
                f"{type(module).__name__} with another forward, patch the model without it"
            )
        if cache_argument(module) is None:  # a short sequence may run a different module
            raise ConfigError(
                f"layers that gather keys need to take a cache; got a {type(module).__name__}, which takes none, call "
                "sp.attention from a model of your own (docs/models.md)"
            )
        name = name_before(module.config) if hasattr(module, "config") else "eager"
        if name not in ("eager", "sdpa"):
            raise ConfigError(
                f"layers that gather keys need eager attention or sdpa, whose masks they can be given; got {name!r}, "
                "call model.set_attn_implementation('sdpa') before the model is patched"
            )


def share(module: Any, sp: SequenceParallel, window: int | None) -> None:
    """Make an attention module run on a rank's pieces, except in local forwards.

    Args:
        module: The module.
        sp: The SequenceParallel whose ranks share sequences.
        window: The window length of the module's mask, or None if the mask has no window.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = kwargs.get(KEYWORD) or between_graphs(current)()
        if context is None:
            raise InputError("a patched layer was reached past its model's forward; call the model that was patched")
        if context.mode == "local":
            return type(self).forward(self, *args, **kwargs)
        call = Pieces(self, window, args, {name: x for name, x in kwargs.items() if name != KEYWORD})
        return _shared(sp, context, call)

    keep_config(module)
    override(module, "forward", types.MethodType(forward, module))


def keep_config(module: Any, name: str | None = None) -> None:
    """Until `restore`, let configs in a module name the attention `name`, or by default their previous attention."""
    for inner in module.modules():
        if (config := vars(inner).get("config")) is None:
            continue
        own = copy.copy(config)
        setattr(own, ATTENTION, name or name_before(config))
        override(inner, "config", own)
