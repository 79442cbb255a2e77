"""Support for mixers: modules with a gated delta rule, Mamba-2, lightning attention or a convolution.

A mixer calls kernels through global names in its file. In a patched model, the forward of the mixer's class runs with
substitutes for these functions. The substitutes pass each call to an `Engine`, which runs the file's original functions
on parts of the sequence. Installed kernels are therefore still used, projections and norms stay unchanged, and no file
is modified.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError, InputError
from ds_seqpar.core.compiler.sharding.shards import Shards
from ds_seqpar.core.runtime.buffers import sum_dtype
from ds_seqpar.core.runtime.runtime import Runtime
from ds_seqpar.data.batch_layout import BatchLayout
from ds_seqpar.operators import recurrence
from ds_seqpar.operators.recurrence import Cell, Function, Rows

from .context import KEYWORD, ForwardContext, current
from .graph_breaks import between_graphs
from .module_patch import is_overridden, override
from .rebinding import globals_read, rebound

PLAIN = "sequence_parallel_without_kernels"  # an attribute of mixers in a small copy
ALIGNED = 8  # causal-conv1d requires token and row strides to be multiples of this number of elements
CHUNK = 8  # number of tokens that torch's functions compute at a time in a small copy


class Engine(Protocol):
    """The interface for running a mixer's layers over sequences."""

    def recurrence(self, function: Function, tokens: Sequence[Tensor], parameters: Sequence[Tensor], cell: Cell) -> Any:
        """Run a layer with a state; see `ds_seqpar.operators.recurrence.recurrence`."""

    def conv(self, function: Callable[[Tensor], Tensor], x: Tensor, kernel_size: int) -> Any:
        """Run a causal convolution; see `ds_seqpar.operators.recurrence.causal_conv`."""


# a function that returns the engine for a call's keywords, or None to leave the call unchanged
EngineOf = Callable[[dict[str, Any]], Engine | None]


def _conv(
    engine: Engine, original: Callable, x: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    def function(rows: Tensor) -> Tensor:
        if any(stride % ALIGNED for stride in rows.stride()[:-1]):  # for example in a view of a projection
            rows = rows.clone(memory_format=torch.contiguous_format)
        return original(rows.mT, weight, bias, activation=activation).mT

    return engine.conv(function, x.mT, weight.shape[-1]).mT


def _delta_rule(
    engine: Engine, original: Callable, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> Any:
        settings = {"output_final_state": True, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return original(q, k, v, g=g, beta=beta, initial_state=state, **settings)

    cell = Cell(key.shape[-1], value.shape[-1], decays=False)
    return engine.recurrence(recurrence.delta_rule(function), [value, query, key, g, beta], [], cell), None


def _mamba2(
    engine: Engine, original: Callable, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), **kwargs: Any,
) -> Tensor:  # fmt: skip
    def function(tokens: list[Tensor], parameters: list[Tensor], continues: bool) -> Rows:
        x, dt, keys, readout = tokens
        rates, *skip = parameters
        out, state = original(x, dt, rates, keys, readout, chunk_size, D=skip[0] if skip else None, **settings)
        if not continues:
            return Rows(out, state.mT)
        return _decayed(out, state.mT, readout, dt * rates)

    settings = {"return_final_states": True}
    # computed outside the function, because padding needs dt = 0 inside it
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    cell = Cell(B.shape[-1], x.shape[-1], decays=True)
    return engine.recurrence(function, [x, dt, B, C], [A] if D is None else [A, D], cell)


def _decayed(out: Tensor, state: Tensor, readout: Tensor, log_decay: Tensor) -> Rows:
    """Return the output rows of a layer whose state decays.

    Args:
        readout: (N, L, groups, K).
        log_decay: (N, L, H).
    """
    decay = log_decay.to(sum_dtype(log_decay.dtype)).cumsum(1).exp()  # a sum in bf16 stops growing after 256 tokens
    return Rows(out, state, readout, decay[:, -1, :, None, None], decay)


def _fused(engine: Engine, original: Callable, *args: Any, **kwargs: Any) -> None:
    """Return None, so that a Mamba-2 mixer falls back to its unfused steps."""


# kernel functions in transformers' files, with the adapter that runs each function on parts of a sequence
SEAMS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _fused,
}
# functions of Mamba-1, in which each channel has a separate state
UNKNOWN = {"mamba_selective_scan", "mamba_inner_fn"}
# buffers of lightning attention modules, which compute attention inline instead of calling a function
LIGHTNING = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module uses the forward of its class and has a layer that an `Engine` can run."""
    is_own = "forward" not in vars(module) or hasattr(module, PLAIN) or is_overridden(module, "forward")
    return is_own and (bool(_seams(module)) or _is_lightning(module))


def use_torch(model: nn.Module) -> None:
    """Make a small copy run without installed kernels, which require specific devices and dtypes."""
    for module in model.modules():
        if is_mixer(module):
            setattr(module, PLAIN, True)
            module.forward = with_engine(module, lambda keywords: None)


def _in_torch(function: Callable) -> Callable:
    """Return the torch implementation, with short chunks, of a transformers function that may dispatch to a kernel."""
    function = inspect.unwrap(function)
    chunk = inspect.signature(function).parameters.get("chunk_size")
    has_default = chunk is not None and chunk.default is not chunk.empty
    return functools.partial(function, chunk_size=CHUNK) if has_default else function


def with_engine(module: nn.Module, engine_of: EngineOf) -> Callable[..., Any]:
    """Return a method that runs a mixer's forward and delegates the mixer's layers to an `Engine`."""
    forward = type(module).forward
    if _is_lightning(module):
        return types.MethodType(functools.partial(_lightning, inspect.unwrap(forward), engine_of), module)
    found = {name: inspect.unwrap(forward).__globals__[name] for name in _seams(module)}
    if hasattr(module, PLAIN):
        found = {name: _in_torch(function) for name, function in found.items()}
    ours = {name: functools.partial(_called, SEAMS[name], function, engine_of) for name, function in found.items()}
    return types.MethodType(rebound(forward, ours, "a layer with a state"), module)


def _seams(module: nn.Module) -> set[str]:
    forward = inspect.unwrap(type(module).forward)
    names = {*globals_read(forward)} & {*getattr(forward, "__globals__", ())}
    return set() if names & UNKNOWN else names & {*SEAMS}


def _is_lightning(module: nn.Module) -> bool:
    return {*LIGHTNING} <= {*dict(module.named_buffers(recurse=False))}


def _called(run: Callable, original: Callable, engine_of: EngineOf, *args: Any, **kwargs: Any) -> Any:
    engine = engine_of(kwargs)
    return original(*args, **kwargs) if engine is None else run(engine, original, *args, **kwargs)


def _lightning(
    forward: Callable, engine_of: EngineOf, module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run a lightning attention module.

    The module's own forward computes the attention product on a stand-in object without projections and norms.
    """
    engine = engine_of(kwargs)
    if engine is None:
        return forward(module, hidden_states, *args, **kwargs)

    def function(tokens: list[Tensor], parameters: list[Tensor], continues: bool) -> Rows:
        (qkv, log_decay), (*decays, diagonal) = tokens, parameters
        alone: Any = types.SimpleNamespace(
            layer_idx=0, head_dim=module.head_dim, block_size=module.block_size, num_attention_heads=qkv.shape[2],
            act_fn=_same, qkv_proj=_same, norm=_same, out_proj=_same, output_gate=lambda x: x.new_tensor(math.inf),
            **dict(zip(LIGHTNING, (*decays, diagonal[None]), strict=True)),
        )  # fmt: skip
        out, state = forward(alone, qkv.flatten(2), None, None)
        out = out.unflatten(2, (qkv.shape[2], -1))
        return _decayed(out, state, qkv[..., : module.head_dim], log_decay) if continues else Rows(out, state)

    qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(2, (module.num_attention_heads, -1))
    slope, query_decay, key_decay, diagonal = (getattr(module, name) for name in LIGHTNING)
    tokens = [qkv, -slope[:, 0, 0].expand(qkv.shape[:3])]
    cell = Cell(module.head_dim, module.head_dim, decays=True)
    out = engine.recurrence(function, tokens, [slope, query_decay, key_decay, diagonal[0]], cell)
    gate = functional.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(out.flatten(2))), None


def _same(x: Tensor) -> Tensor:
    return x


# ---- in a patched model


@dataclasses.dataclass(frozen=True)
class _Shared:
    """An engine that runs layers over sequences that ranks share."""

    runtime: Runtime
    layout: BatchLayout | None

    @property
    def tokens(self) -> tuple[Shards | None, tuple[int, ...]]:
        if self.layout is None:
            return None, ()
        if self.layout.mask.parents:
            raise InputError(
                f"layers with a state need documents without parents; got a layout with {self.layout.mask}, give each "
                "document a row of its own, behind copies of its parents"
            )
        return self.layout.shards, self.layout.mask.documents

    def recurrence(self, function: Function, tokens: Sequence[Tensor], parameters: Sequence[Tensor], cell: Cell) -> Any:
        run = between_graphs(recurrence.recurrence)
        return run(self.runtime, function, tokens, parameters, cell, *self.tokens)

    def conv(self, function: Callable[[Tensor], Tensor], x: Tensor, kernel_size: int) -> Any:
        return between_graphs(recurrence.causal_conv)(self.runtime, function, x, kernel_size, *self.tokens)


def check(modules: Iterable[nn.Module]) -> None:
    """Raise ConfigError if a mixer in the small copy is not a mixer in the model itself."""
    for module in modules:
        if not is_mixer(module):
            raise ConfigError(
                "layers with a state need the forward of their class; got a "
                f"{type(module).__name__} with another forward, patch the model without it"
            )


def share(module: nn.Module, sp: SequenceParallel) -> None:
    """Make a mixer run over the sequences that ranks share, except in local forwards."""

    def engine_of(keywords: dict[str, Any]) -> Engine | None:
        context: ForwardContext | None = keywords.get(KEYWORD) or between_graphs(current)()
        if context is None:
            raise InputError("a patched layer was reached past its model's forward; call the model that was patched")
        return None if context.mode == "local" else _Shared(sp.runtime, context.layout)

    override(module, "forward", with_engine(module, engine_of))
