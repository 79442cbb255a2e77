"""Checks of attention's inputs before anything is sent. This rank's own checks run first, then the guards.

A check whose parameter has type `object` must handle any value that a user may pass.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ...base.errors import InputError, SeqParError, as_seqpar_error
from ...base.fingerprint import Compared, Fingerprint
from ..compiler.sharding.heads import check_heads
from ..compiler.sharding.masks import CAUSAL, FULL, Mask
from ..compiler.sharding.op_handles import object_of
from ..compiler.sharding.shards import Shards, UnevenShards, check_blocks_per_rank, tokens_by_ulysses_rank
from ..settings import check_length
from . import replay
from .buffers import Tensors
from .call import CallSettings
from .kernels import Scores
from .operator import DENSE, OPERATORS, Operator, check_derivatives, derivatives_error, describe
from .runtime import Runtime
from .seams import ATTENTION, Inputs
from .transport import TorchComm


def mask_of(causal: bool, mask: Mask | None) -> Mask:
    """Return `mask`, or the mask for `causal` if `mask` is None.

    If `causal` is not a bool, return `causal` unchanged so that a later check can reject it.
    """
    if mask is not None:
        return mask
    return {True: CAUSAL, False: FULL}[causal] if isinstance(causal, bool) else causal


COMPARED = "attention inputs"  # name of the compared fields in error messages


class AttentionOptions(NamedTuple):
    """The non-tensor arguments of an attention call, as in `SequenceParallel.attention`."""

    mask: Mask
    shards: UnevenShards | None  # None: the configured layout
    scale: float | None
    backward: bool = False  # whether a backward pass may follow
    lse: bool = False  # whether the caller requests the lse
    softcap: float | None = None
    sinks: Tensor | None = None
    operator: Operator = DENSE  # defines the computation and its tensors
    layer: int | None = None  # layer index in a patched model, for guards; None in compiled code


class AdmittedCall(NamedTuple):
    """A call whose inputs all ranks that share the sequence have accepted."""

    runtime: Runtime
    tensors: Tensors  # the operator's prepared tensors
    sinks: Tensor | None
    settings: CallSettings
    return_lse: bool
    checkpointed: bool  # whether the call is inside one of our checkpoints
    agreement: Tensor | None  # in compiled graphs, the result of `agreement_op`, an input of ops that must run later


def admitted_call(
    runtime: Runtime, tensors: Sequence[Tensor], options: AttentionOptions, agreed: bool = False, parts: int = 1
) -> AdmittedCall:
    """Check a call and decide how to compute it. Collective if `check_inputs` is collective, unless `agreed` is True.

    Args:
        runtime: Runtime of this rank.
        tensors: This rank's tensors in the form that `options.operator` expects, such as q (B, s, Hq, D), k (B, t, Hkv,
            D) and v (B, t, Hkv, Dv).
        options: The call's other arguments.
        agreed: Whether the ranks have already agreed on the inputs.
        parts: Number of head chunks if the caller splits the heads and makes one call per head chunk, otherwise 1.
    """
    agreement, compiling = None, torch.compiler.is_compiling()
    checkpoint = replay.NONE if compiling else replay.current()
    if agreed:
        check_derivatives(*tensors)
    elif compiling and _can_be_op(runtime, tensors, options):
        mask, shards, *rest, operator, _ = options
        handles = runtime.handle, mask.handle, handle_of_shards(shards)
        agreement = agreement_op(tensors, *handles, *rest, operator.name)
    elif not checkpoint.replays_next:  # replayed results need no computation and no communication
        check_inputs(runtime, tensors, options)
    scale = tensors[0].shape[-1] ** -0.5 if options.scale is None else float(options.scale)
    tensors, v_dim = options.operator.prepare(tensors)
    q, keys, *_ = tensors
    head_chunks = runtime.head_chunks(q, keys.shape[2], options.mask, options.shards) if parts == 1 else 1
    checkpointed = checkpoint is not replay.NONE
    saves = runtime.config.kept(max(head_chunks, parts), checkpointed, checkpoint.checkpoint_saves)
    settings = CallSettings(
        options.mask, options.shards, Scores(scale, float(options.softcap or 0.0)), head_chunks, saves,
        options.lse and runtime.ulysses.size > 1, options.operator, v_dim, options.layer,
    )  # fmt: skip
    return AdmittedCall(runtime, tensors, options.sinks, settings, options.lse, checkpointed, agreement)


def _can_be_op(runtime: Runtime, tensors: Sequence[Any], options: AttentionOptions) -> bool:
    """Return whether attention can be an op in a compiled graph.

    The arguments must have the right types, and the heads must be divisible among Ulysses ranks and head chunks. All
    other checks run when the compiled graph executes `agreement_op`.
    """
    operator = options.operator
    readable = all(isinstance(x, Tensor) and x.dim() == n for x, n in zip(tensors, operator.dims, strict=True))
    values = isinstance(options.mask, Mask) and isinstance(options.shards, UnevenShards | None)
    scalars = all(x is None or isinstance(x, int | float) for x in (options.scale, options.softcap))
    if not (readable and values and scalars and isinstance(options.sinks, Tensor | None)):
        return False
    q_heads, kv_heads = (x.shape[2] for x in operator.prepare(tensors)[0][:2])
    head_chunks = 1 if runtime.config.head_chunks == "auto" else runtime.config.head_chunks
    if kv_heads < 1 or q_heads % kv_heads:
        return False
    return q_heads // kv_heads * (kv_heads // head_chunks) >= runtime.ulysses.size  # at least one query head each


CONFIGURED = -1  # handle that stands for the shards of the configured layout


def handle_of_shards(shards: Shards | None) -> int:
    return shards.handle if isinstance(shards, UnevenShards) else CONFIGURED


def shards_of(handle: int) -> UnevenShards | None:
    return None if handle == CONFIGURED else object_of(handle)


@torch.library.custom_op("ds_seqpar::agree", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def agreement_op(
    tensors: Sequence[Tensor], handle: int, mask: int, shards: int, scale: float | None, backward: bool, lse: bool,
    softcap: float | None, sinks: Tensor | None, operator: str,
) -> Tensor:  # fmt: skip
    """Call `check_inputs` in a compiled graph.

    The result is an empty tensor. Ops that must run after the check take the empty tensor as an argument.
    """
    of = OPERATORS[operator]
    options = AttentionOptions(object_of(mask), shards_of(shards), scale, backward, lse, softcap, sinks, of)
    check_inputs(object_of(handle), tensors, options)
    return _empty(tensors)


@agreement_op.register_fake
def _empty(tensors: Sequence[Tensor], *rest: object) -> Tensor:
    return tensors[0].new_empty(0, dtype=torch.int64)  # an integer tensor, so no gradient flows through it


def check_inputs(runtime: Runtime, tensors: Sequence[Tensor], options: AttentionOptions) -> None:
    """Check a call's inputs on this rank, then run the guards, which compare inputs between ranks.

    Collective if there are guards.

    Raises:
        InputError, ConfigError, KernelError, DisagreementError: This rank cannot compute attention over its inputs.
            With guards, all ranks that share the sequence raise the error together. All ranks also raise an error if
            inputs or settings differ between ranks.
    """
    if torch.compiler.is_compiling():  # a decorator would import the compiler in every process, which takes seconds
        torch.compiler.disable(check_inputs)(runtime, tensors, options)
        return
    key = _key(tensors, options)
    compared = runtime.admitted.get(key) if key is not None else None
    if compared is None:
        error = attention_error(runtime, tensors, options)
        # describing invalid inputs may fail
        compared = Compared(COMPARED, {} if error else _compared_fields(runtime, tensors, options))
        if error is None and key is not None:
            runtime.remember(key, compared)
    else:
        error = derivatives_error(*tensors)
    # with invalid inputs, the number of tensors may be wrong
    named = dict(zip(options.operator.inputs, tensors, strict=False))
    runtime.admit(Inputs(ATTENTION, compared, named), error)


def _key(tensors: Sequence[Any], options: AttentionOptions) -> tuple | None:
    """Return a cache key that covers all values used by the checks, except derivatives.

    Inputs with equal keys pass the same checks. The key is None if an input is nested, or is not a plain tensor or
    parameter.
    """
    tensors = [*tensors, *(() if options.sinks is None else (options.sinks,))]
    if not all(type(x) in (Tensor, Parameter) and not x.is_nested for x in tensors):  # other classes may have no shape
        return None
    properties = tuple((x.layout, x.shape, x.dtype, x.device) for x in tensors)
    # Types come first because the comparison of keys stops at the first difference, and values of different types may
    # not be comparable.
    key = tuple(type(x) for x in options), properties, options._replace(sinks=None), replay.current().which_run
    try:
        hash(key)
    except TypeError:  # an argument has an unsupported type
        return None
    return key


def _compared_fields(runtime: Runtime, tensors: Sequence[Tensor], options: AttentionOptions) -> dict[str, object]:
    """Return, by name, the fields that must be equal on all ranks. Lengths may differ if shards are uneven."""
    assert isinstance(runtime.comm, TorchComm)  # virtual ranks share a process, so there is nothing to compare
    named = dict(zip(options.operator.inputs, tensors, strict=True))
    fields: dict[str, object] = {name: describe(x) for name, x in named.items()}
    if options.shards is not None:
        fields = {name: f"{(x.shape[0], *x.shape[2:])} {x.dtype}" for name, x in named.items()}
        fields["shards"] = f"of {options.shards.size} ranks {options.shards.fingerprint}"
    fields |= {"causal": options.mask.causal, "scale": options.scale, "checkpoint": replay.current().which_run}
    fields |= {"backward": options.backward, "return_lse": options.lse, "SequenceParallel": runtime.comm.groups.number}
    fields["operator"] = options.operator.name
    if not options.mask.scale_free:
        fields["mask"] = f"{options.mask} {Fingerprint.of(options.mask)}"
    if options.sinks is not None:
        fields["sinks"] = describe(options.sinks)
    return fields | ({"softcap": options.softcap} if options.softcap is not None else {})


def attention_error(runtime: Runtime, tensors: Sequence[Tensor], options: AttentionOptions) -> SeqParError | None:
    """Return an error that explains why this rank cannot compute attention over its inputs, or None if there is no
    error.
    """
    try:
        options.operator.check_options(options)
        operator, lengths_differ = options.operator, options.shards is not None
        check_arguments(tensors, options.mask, options.scale, lengths_differ, operator)
        tensors, v_dim = operator.prepare(tensors)
        check_softcap(options.softcap)
        check_sinks(options.sinks, tensors[0])
        if options.shards is not None:
            check_shards(options.shards, runtime.compiler.recipe.size, runtime.config.layout)
        chunks, scores = runtime.config.head_chunks, Scores(1.0, options.softcap or 0.0)
        settings = CallSettings(
            options.mask, options.shards, scores, 1 if chunks == "auto" else chunks, operator=operator, v_dim=v_dim
        )
        check_shares(runtime, tensors, settings)
    except Exception as error:  # if only one rank raised, its peers would keep waiting
        return as_seqpar_error("attention needs a kernel and a program on every rank; making them failed", error)
    return None


def check_arguments(
    tensors: Sequence[object], mask: object, scale: object, lengths_differ: bool = False, operator: Operator = DENSE
) -> None:
    """Raise InputError if attention does not support the tensors, the mask or the scale on any number of ranks.

    Args:
        tensors: Tensors of the operator.
        mask: A Mask.
        scale: Factor by which scores are multiplied.
        lengths_differ: Whether k and v may differ from q in length.
        operator: The operator to compute.
    """
    try:
        _check_settings(mask, scale)
        operator.check(tensors, lengths_differ)
    except SeqParError:
        raise
    except Exception as error:  # raised by a nonstandard tensor or number class
        raise as_seqpar_error(
            f"attention needs {', '.join(operator.inputs)}, causal and scale that can be read; reading them failed",
            error,
        ) from error


def _check_settings(mask: object, scale: object) -> None:
    if not isinstance(mask, Mask):
        got = "a tensor" if isinstance(mask, Tensor) else f"{' '.join(repr(mask).split()):.80}"
        raise InputError(f"attention needs causal True or False, or a Mask; got {got}, full attention is causal=False")
    if scale is None:
        return
    if not _is_positive(scale):
        got = "a tensor" if isinstance(scale, Tensor) else repr(scale)
        raise InputError(
            f"attention needs a scale that is a number above 0 (in fp32), or None for head_dim ** -0.5; got {got}, "
            "multiply q for anything else"
        )


def check_softcap(softcap: object) -> None:
    """Raise InputError if the softcap is neither None nor a positive number."""
    if softcap is not None and not _is_positive(softcap):
        raise InputError(f"attention needs a softcap that is a number above 0 (in fp32), or None; got {softcap!r:.80}")


def check_sinks(sinks: object, q: Tensor) -> None:
    """Raise InputError if `sinks` is neither None nor a tensor with one number per query head."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or sinks.shape != q.shape[2:3] or not sinks.is_floating_point():
        raise InputError(
            f"attention needs sinks of shape ({q.shape[2]},), a number for each query head of the model, or None; got "
            f"{describe(sinks)}"
        )
    if sinks.device != q.device:
        raise InputError(f"attention needs sinks on q's device; got {sinks.device} and {q.device}")


def _is_positive(x: Any) -> bool:
    """Return whether x is a positive number within the range of fp32.

    A kernel rounds smaller numbers to 0, and 0 times a mask's -inf is NaN. Larger numbers overflow to infinity.
    """
    fp32, is_real = torch.finfo(torch.float32), isinstance(x, numbers.Real) and not isinstance(x, bool)
    return is_real and bool(fp32.tiny <= x <= fp32.max)


def check_shares(runtime: Runtime, tensors: Tensors, settings: CallSettings) -> None:
    """Raise ConfigError, InputError or KernelError if the heads, length, mask, program and kernel are not compatible.

    The kernel is checked before communication starts, because the kernel's package may be missing on some ranks.
    """
    (q, keys, *_), config = tensors, runtime.config
    check_heads(config.ulysses, q.shape[2], keys.shape[2], size=config.size, head_chunks=config.head_chunks)
    if settings.shards is None:
        check_length(config, q.shape[1] * config.size)
        check_documents(settings.mask, q.shape[1] * config.size)
    else:
        _check_tokens(runtime, q, keys, settings.shards)
    for direction in ("forward", "backward"):
        runtime.bound(direction, q, [x.shape for x in tensors], settings)


def check_documents(mask: Mask, seq: int) -> None:
    """Raise InputError if a document begins after the first `seq` tokens."""
    if mask.documents and mask.documents[-1] >= seq:
        raise InputError(
            f"a mask's documents must begin within the sequence of {seq} tokens; got one at {mask.documents[-1]}, "
            "give first positions in the whole sequence, not in a rank's shard of it"
        )


def check_shards(shards: object, size: int, layout: str) -> None:
    """Raise InputError unless the shards are for `size` CP ranks and have as many blocks per rank as the layout."""
    if not isinstance(shards, UnevenShards):
        got = type(shards).__name__
        raise InputError(f"attention needs shards that are UnevenShards, or None for the configured layout; got {got}")
    if shards.size != size:
        raise InputError(f"attention needs shards of the {size} CP ranks; got some of {shards.size} ranks")
    check_blocks_per_rank(shards, layout)


def _check_tokens(runtime: Runtime, q: Tensor, k: Tensor, shards: Shards) -> None:
    ulysses_size, ulysses_rank = runtime.ulysses
    tokens = [tokens_by_ulysses_rank(shards, side, runtime.rank, ulysses_size)[ulysses_rank] for side in ("q", "kv")]
    if [q.shape[1], k.shape[1]] != tokens:
        raise InputError(
            f"attention needs the tokens that the shards give this rank, {tokens[0]} of q and {tokens[1]} of k and v; "
            f"got {q.shape[1]} and {k.shape[1]}"
        )
