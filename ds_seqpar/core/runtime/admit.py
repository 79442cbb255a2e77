"""Checks of attention's inputs, on this rank and then by guards, before anything is sent. A check whose argument is
`object` must accept anything that a user may pass.
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
    """Return the mask if it is not None, otherwise the mask for `causal`, True or False. Any other `causal` is returned
    as it is, for a check to refuse.
    """
    if mask is not None:
        return mask
    return {True: CAUSAL, False: FULL}[causal] if isinstance(causal, bool) else causal


COMPARED = "attention inputs"  # the name in messages of what ranks compare


class AttentionOptions(NamedTuple):
    """The arguments of a call of attention other than its tensors, as in `SequenceParallel.attention`."""

    mask: Mask
    shards: UnevenShards | None  # None for the configured layout
    scale: float | None
    backward: bool = False  # whether a backward may follow
    lse: bool = False  # whether the caller asks for the lse
    softcap: float | None = None
    sinks: Tensor | None = None
    operator: Operator = DENSE  # what is computed of which tensors
    layer: int | None = None  # of a patched model, for guards; None in compiled code


class AdmittedCall(NamedTuple):
    """A call that every rank of the sequence can compute."""

    runtime: Runtime
    tensors: Tensors  # of the operator, prepared
    sinks: Tensor | None
    settings: CallSettings
    return_lse: bool
    checkpointed: bool  # whether a checkpoint of ours is around the call
    agreement: Tensor | None  # in a compiled graph: the result of `agreement_op`, for ops that must run after it


def admitted_call(
    runtime: Runtime, tensors: Sequence[Tensor], options: AttentionOptions, agreed: bool = False, parts: int = 1
) -> AdmittedCall:
    """Check a call, and decide how it is computed. Collective like `check_inputs`, unless `agreed`.

    Args:
        runtime: The runtime of this rank.
        tensors: This rank's tokens, as `options.operator` takes them: q (B, s, Hq, D), k (B, t, Hkv, D) and v
            (B, t, Hkv, Dv).
        options: The other arguments of the call.
        agreed: Whether the ranks have already agreed on the inputs.
        parts: If above 1, the number of head chunks. The tensors hold the heads of one of them, and the caller calls
            this for each.
    """
    agreement, compiling = None, torch.compiler.is_compiling()
    checkpoint = replay.NONE if compiling else replay.current()
    if agreed:
        check_derivatives(*tensors)
    elif compiling and _can_be_op(runtime, tensors, options):
        mask, shards, *rest, operator, _ = options
        handles = runtime.handle, mask.handle, handle_of_shards(shards)
        agreement = agreement_op(tensors, *handles, *rest, operator.name)
    elif not checkpoint.replays_next:  # a result that is replayed is neither computed nor sent
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
    """Return whether attention can be an op of a compiled graph. It needs the right types, and heads that can be
    distributed over Ulysses ranks and head chunks. Everything else is checked when the agreement runs.
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
    return q_heads // kv_heads * (kv_heads // head_chunks) >= runtime.ulysses.size  # a query head for each Ulysses rank


CONFIGURED = -1  # in place of a handle: shards of the configured layout


def handle_of_shards(shards: Shards | None) -> int:
    return shards.handle if isinstance(shards, UnevenShards) else CONFIGURED


def shards_of(handle: int) -> UnevenShards | None:
    return None if handle == CONFIGURED else object_of(handle)


@torch.library.custom_op("ds_seqpar::agree", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def agreement_op(
    tensors: Sequence[Tensor], handle: int, mask: int, shards: int, scale: float | None, backward: bool, lse: bool,
    softcap: float | None, sinks: Tensor | None, operator: str,
) -> Tensor:  # fmt: skip
    """Call `check_inputs` in a compiled graph. Returns an empty tensor that ops take as an argument if they must run
    afterwards.
    """
    of = OPERATORS[operator]
    options = AttentionOptions(object_of(mask), shards_of(shards), scale, backward, lse, softcap, sinks, of)
    check_inputs(object_of(handle), tensors, options)
    return _empty(tensors)


@agreement_op.register_fake
def _empty(tensors: Sequence[Tensor], *rest: object) -> Tensor:
    return tensors[0].new_empty(0, dtype=torch.int64)  # integers, through which no gradient flows


def check_inputs(runtime: Runtime, tensors: Sequence[Tensor], options: AttentionOptions) -> None:
    """Check the inputs of a call on this rank, and by guards, which compare them between ranks. Collective if there are
    guards.

    Raises:
        InputError, ConfigError, KernelError, DisagreementError: Attention cannot take this rank's inputs. With guards,
            it is raised on all ranks of the sequence, and also if inputs or settings differ between them.
    """
    if torch.compiler.is_compiling():  # no decorator: it imports the compiler, which takes seconds, in every process
        torch.compiler.disable(check_inputs)(runtime, tensors, options)
        return
    key = _key(tensors, options)
    compared = runtime.admitted.get(key) if key is not None else None
    if compared is None:
        error = attention_error(runtime, tensors, options)
        # after an error the inputs may be nothing that can be described
        compared = Compared(COMPARED, {} if error else _compared_fields(runtime, tensors, options))
        if error is None and key is not None:
            runtime.remember(key, compared)
    else:
        error = derivatives_error(*tensors)
    named = dict(zip(options.operator.inputs, tensors, strict=False))  # wrong ones may be few or many
    runtime.admit(Inputs(ATTENTION, compared, named), error)


def _key(tensors: Sequence[Any], options: AttentionOptions) -> tuple | None:
    """Return everything that the checks read except derivatives, so that inputs with equal keys pass the same checks.
    None if an input is nested, or is not a plain tensor or parameter.
    """
    tensors = [*tensors, *(() if options.sinks is None else (options.sinks,))]
    if not all(type(x) in (Tensor, Parameter) and not x.is_nested for x in tensors):  # some others have no shape
        return None
    properties = tuple((x.layout, x.shape, x.dtype, x.device) for x in tensors)
    # types first: a comparison of keys ends at the first difference, and values of other types may not be comparable
    key = tuple(type(x) for x in options), properties, options._replace(sinks=None), replay.current().which_run
    try:
        hash(key)
    except TypeError:  # an argument is nothing that attention takes
        return None
    return key


def _compared_fields(runtime: Runtime, tensors: Sequence[Tensor], options: AttentionOptions) -> dict[str, object]:
    """Return by name the fields that must be the same on all ranks. With uneven shards, lengths may differ."""
    assert isinstance(runtime.comm, TorchComm)  # virtual ranks are in one process, and are not compared
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
    """Return an error that says why this rank cannot compute attention over these inputs, or None if it can."""
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
    except Exception as error:  # a rank that raised alone would leave its peers waiting
        return as_seqpar_error("attention needs a kernel and a program on every rank; making them failed", error)
    return None


def check_arguments(
    tensors: Sequence[object], mask: object, scale: object, lengths_differ: bool = False, operator: Operator = DENSE
) -> None:
    """Raise InputError for tensors, a mask or a scale that attention cannot take on any number of ranks.

    Args:
        tensors: Of the operator.
        mask: A Mask.
        scale: Factor of the scores.
        lengths_differ: Whether keys may have another length than q.
        operator: The operator to compute.
    """
    try:
        _check_settings(mask, scale)
        operator.check(tensors, lengths_differ)
    except SeqParError:
        raise
    except Exception as error:  # raised by a tensor or a number of another class
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
    """Raise InputError for a softcap that is neither None nor a number above 0."""
    if softcap is not None and not _is_positive(softcap):
        raise InputError(f"attention needs a softcap that is a number above 0 (in fp32), or None; got {softcap!r:.80}")


def check_sinks(sinks: object, q: Tensor) -> None:
    """Raise InputError for sinks that are neither None nor one number for each of q's heads."""
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
    """Return whether x is a positive number in fp32's range. A smaller number is 0 in a kernel, and 0 times a mask's
    -inf is NaN; a larger one is infinity.
    """
    fp32, is_real = torch.finfo(torch.float32), isinstance(x, numbers.Real) and not isinstance(x, bool)
    return is_real and bool(fp32.tiny <= x <= fp32.max)


def check_shares(runtime: Runtime, tensors: Tensors, settings: CallSettings) -> None:
    """Raise ConfigError, InputError or KernelError if heads, length, mask, program or kernel do not fit. The kernel is
    checked here, while other ranks can still be told: its package may be missing on some ranks.
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
    """Raise InputError for documents that begin after `seq` tokens."""
    if mask.documents and mask.documents[-1] >= seq:
        raise InputError(
            f"a mask's documents must begin within the sequence of {seq} tokens; got one at {mask.documents[-1]}, "
            "give first positions in the whole sequence, not in a rank's shard of it"
        )


def check_shards(shards: object, size: int, layout: str) -> None:
    """Raise InputError unless these are shards of `size` CP ranks, each with as many blocks as in the layout."""
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
