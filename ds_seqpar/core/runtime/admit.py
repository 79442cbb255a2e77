"""Checks of attention's inputs, on this rank and then between ranks, before anything is sent.

Where a check takes `object`, a user may have passed anything.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ...base import compat
from ...base.errors import InputError, SeqParError, as_seqpar_error
from ...base.fingerprint import Fingerprint
from ...guards import mismatch_hints
from ...guards.agreement import Compared
from ...memory import checkpoints
from ...operators.latent import padded
from ..compiler.sharding.handles import object_of
from ..compiler.sharding.heads import check_heads
from ..compiler.sharding.masks import CAUSAL, FULL, Mask
from ..compiler.sharding.shards import Shards, UnevenShards, check_blocks_per_rank, tokens_by_ulysses_rank, tokens_of
from ..settings import SequenceParallelConfig, check_length
from .groups import check_thread
from .kernels import Scores
from .runtime import CallSettings, Runtime
from .transport import TorchComm


def mask_of(causal: bool, mask: Mask | None) -> Mask:
    """Return the mask if it is not None, else the mask of `causal`, True or False. Any other `causal` is returned, for
    a check to refuse."""
    if mask is not None:
        return mask
    return {True: CAUSAL, False: FULL}[causal] if isinstance(causal, bool) else causal


COMPARED = "attention inputs"  # the name in messages of what ranks compare


class AttentionOptions(NamedTuple):
    """The arguments of a call of attention beside q, k and v, as in `SequenceParallel.attention`."""

    mask: Mask
    shards: UnevenShards | None  # None for the configured layout
    scale: float | None
    backward: bool = False  # whether a backward may follow
    lse: bool = False  # whether the caller asks for the lse
    softcap: float | None = None
    sinks: Tensor | None = None
    latent: bool = False  # whether k is the latent (batch, local_seq, R) and v the matrix that expands it


class AdmittedCall(NamedTuple):
    """A call that every rank of the sequence can compute."""

    runtime: Runtime
    tensors: tuple[Tensor, Tensor, Tensor]  # q, k and v of one head_dim
    sinks: Tensor | None
    settings: CallSettings
    v_dim: int  # head_dim of the caller's v
    return_lse: bool
    checkpointed: bool  # whether a checkpoint of ours is around the call
    agreement: Tensor | None  # in a compiled graph: the result of `agreement_op`, for ops that must run after it


def admit(
    runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, agreed: bool = False, parts: int = 1
) -> AdmittedCall:
    """Check a call, and decide how it is computed. Collective, as `agree_on_inputs` is, unless `agreed`.

    Args:
        runtime: The runtime of this rank.
        q: (B, s, Hq, D), this rank's tokens.
        k: (B, t, Hkv, D), this rank's tokens; in latent attention the latent (B, t, R).
        v: (B, t, Hkv, Dv), this rank's tokens; in latent attention the matrix (Hq, R, D + Dv).
        options: The other arguments of the call.
        agreed: Whether the ranks have agreed on the inputs already.
        parts: If above 1, the tensors hold the heads of one of so many head chunks, and the caller calls this for each
            head chunk.
    """
    agreement, compiling = None, torch.compiler.is_compiling()
    replay = None if compiling else checkpoints.current()
    if agreed:
        check_derivatives(q, k, v)
    elif compiling and _can_be_op(runtime, q, k, v, options):
        mask, shards, *rest = options
        agreement = agreement_op(q, k, v, runtime.handle, mask.handle, handle_of_shards(shards), *rest)
    elif replay is None or not replay.replays_next:  # a result that is replayed is neither computed nor sent
        agree_on_inputs(runtime, q, k, v, options)
    v_dim, scale = v.shape[-1], q.shape[-1] ** -0.5 if options.scale is None else float(options.scale)
    head_chunks = 1
    if options.latent:
        v_dim -= q.shape[-1]
        q, k = padded(q, v_dim), k.unsqueeze(2)
    else:
        q, k, v = of_one_head_dim(q, k, v) if q.shape[-1] != v_dim else (q, k, v)
        head_chunks = runtime.head_chunks(q, k.shape[2], options.mask, options.shards) if parts == 1 else 1
    checkpointed = replay is not None
    saves = runtime.config.kept(max(head_chunks, parts), checkpointed, replay is not None and replay.checkpoint_saves)
    settings = CallSettings(
        options.mask, options.shards, Scores(scale, float(options.softcap or 0.0)), head_chunks, saves,
        options.lse and runtime.ulysses.size > 1, v_dim if options.latent else 0,
    )  # fmt: skip
    return AdmittedCall(runtime, (q, k, v), options.sinks, settings, v_dim, options.lse, checkpointed, agreement)


def _can_be_op(runtime: Runtime, q: object, k: object, v: object, options: AttentionOptions) -> bool:
    """Return whether attention can be an op of a compiled graph. It needs the right types, and heads that can be
    distributed over Ulysses ranks and head chunks. All else is checked when the agreement runs."""
    dims = (4, 3, 3) if options.latent else (4, 4, 4)
    tensors = all(isinstance(x, Tensor) and x.dim() == n for x, n in zip((q, k, v), dims, strict=True))
    values = isinstance(options.mask, Mask) and isinstance(options.shards, UnevenShards | None)
    scalars = all(x is None or isinstance(x, int | float) for x in (options.scale, options.softcap))
    if not (tensors and values and scalars and isinstance(options.sinks, Tensor | None)):
        return False
    q_heads, kv_heads = q.shape[2], 1 if options.latent else k.shape[2]  # type: ignore[attr-defined]
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
    q: Tensor, k: Tensor, v: Tensor, handle: int, mask: int, shards: int, scale: float | None,
    backward: bool, lse: bool, softcap: float | None, sinks: Tensor | None, latent: bool,
) -> Tensor:  # fmt: skip
    """Call `agree_on_inputs` in a compiled graph. Returns an empty tensor, an argument of ops that must run
    afterwards."""
    options = AttentionOptions(object_of(mask), shards_of(shards), scale, backward, lse, softcap, sinks, latent)
    agree_on_inputs(object_of(handle), q, k, v, options)
    return _empty(q)


@agreement_op.register_fake
def _empty(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(0, dtype=torch.int64)  # integers, through which no gradient flows


def agree_on_inputs(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
    """Check the inputs of a call on this rank, and compare them between the ranks that share the sequence. Collective.

    Raises:
        InputError, ConfigError, KernelError, DisagreementError: On all of these ranks, if one of them got inputs that
            attention cannot take, or other shapes, dtypes or settings than its peers.
    """
    if torch.compiler.is_compiling():  # no decorator: it imports the compiler, which takes seconds, in every process
        torch.compiler.disable(agree_on_inputs)(runtime, q, k, v, options)
        return
    assert isinstance(runtime.comm, TorchComm)  # virtual ranks are in one process, and need no agreement
    group, error, key = runtime.comm.groups.control, None, _key(q, k, v, options)
    if group is not None:
        check_thread()
        runtime.calls.enter()
    compared = runtime.admitted.get(key) if key is not None else None
    if compared is None:
        error = attention_error(runtime, q, k, v, options)
        # after an error the inputs may be nothing that can be described
        compared = Compared(COMPARED, {} if error or group is None else _compared_fields(runtime, q, k, v, options))
        if error is None and key is not None:
            runtime.admit(key, compared)
    else:
        error = derivatives_error(q, k, v)
    if error is None and group is None:
        return  # there is no other rank to compare with
    # inside a torch.func transform nothing can be sent, not even the error that refuses the transform
    with compat.without_torch_func():
        runtime.checker.check_deferred(
            COMPARED, compared, error=error, call="attention", advice=mismatch_hints.of_attention,
            device=getattr(q, "device", None),
        )  # fmt: skip


def _key(q: object, k: object, v: object, options: AttentionOptions) -> tuple | None:
    """Return all that the checks read but derivatives, so that inputs of equal keys pass the same checks. None if one
    is nested, or is no plain tensor or parameter."""
    tensors = q, k, v, *(() if options.sinks is None else (options.sinks,))
    if not all(type(x) in (Tensor, Parameter) and not x.is_nested for x in tensors):  # some others have no shape
        return None
    properties = tuple((x.layout, x.shape, x.dtype, x.device) for x in tensors)
    # types first: a comparison of keys ends at the first difference, and values of other types may not be comparable
    key = tuple(type(x) for x in options), properties, options._replace(sinks=None), _which_run()
    try:
        hash(key)
    except TypeError:  # an argument is nothing that attention takes
        return None
    return key


def _which_run() -> str:
    replay = checkpoints.current()
    return "none" if replay is None else replay.which_run


def _compared_fields(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> dict[str, object]:
    """Return what must be the same on all ranks, by name. With uneven shards the lengths may differ."""
    tensors = dict(zip(("q", "latent", "expand") if options.latent else "qkv", (q, k, v), strict=True))
    fields: dict[str, object] = {name: describe(x) for name, x in tensors.items()}
    if options.shards is not None:
        fields = {name: f"{(x.shape[0], *x.shape[2:])} {x.dtype}" for name, x in tensors.items()}
        fields["shards"] = f"of {options.shards.size} ranks {options.shards.fingerprint}"
    fields |= {"causal": options.mask.causal, "scale": options.scale, "checkpoint": _which_run()}
    fields |= {"backward": options.backward, "return_lse": options.lse, "SequenceParallel": runtime.calls.of[0]}
    if not runtime.differentiable:
        fields["keys"] = "that are kept"
    if not options.mask.scale_free:
        fields["mask"] = f"{options.mask} {Fingerprint.of(options.mask)}"
    if options.sinks is not None:
        fields["sinks"] = describe(options.sinks)
    return fields | ({"softcap": options.softcap} if options.softcap is not None else {})


def attention_error(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> SeqParError | None:
    """Return the reason why this rank cannot compute attention over these inputs as an error, or None if it can."""
    try:
        if not runtime.differentiable:
            check_kept(options)
        if options.latent:
            _check_settings(options.mask, options.scale)
            q, k = as_heads(q, k, v, options.shards is not None)
        else:
            check_arguments(q, k, v, options.mask, options.scale, lengths_differ=options.shards is not None)
            q, k, _ = of_one_head_dim(q, k, v)
        check_softcap(options.softcap)
        check_sinks(options.sinks, q)
        if options.shards is not None:
            check_shards(options.shards, runtime.compiler.recipe.size, runtime.config.layout)
        check_shares(runtime, q, k, options.mask, options.shards, options.softcap or 0.0, options.latent)
    except Exception as error:  # a rank that raised alone would leave its peers waiting
        return as_seqpar_error("attention needs a kernel and a program on every rank; making them failed", error)
    return None


def check_kept(options: AttentionOptions) -> None:
    """Raise InputError for options that attention to kept keys does not take."""
    check_no_gradients(options.backward)
    if not isinstance(options.shards, UnevenShards):
        got = type(options.shards).__name__
        raise InputError(
            f"attention to kept keys needs shards that are UnevenShards, of new tokens and kept; got {got}"
        )


def check_no_gradients(backward: bool) -> None:
    """Raise InputError where kept keys are attended to with gradients."""
    if backward:
        raise InputError(
            "attention to kept keys has no backward; got tensors that require gradients, call it under torch.no_grad()"
        )


def check_arguments(q: object, k: object, v: object, mask: object, scale: object, lengths_differ: bool = False) -> None:
    """Raise InputError for tensors, a mask or a scale that attention cannot take on any number of ranks.

    Args:
        lengths_differ: Whether k and v may have another length than q.
    """
    try:
        _check_settings(mask, scale)
        _check_tensors(q, k, v, lengths_differ)
    except SeqParError:
        raise
    except Exception as error:  # raised by a tensor or a number of another class
        raise as_seqpar_error(
            "attention needs q, k, v, causal and scale that can be read; reading them failed", error
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
    """Return whether x is a number above 0 in fp32's range. A smaller one is 0 in a kernel, and 0 times a mask's -inf
    is NaN; a larger one is infinity."""
    fp32, is_real = torch.finfo(torch.float32), isinstance(x, numbers.Real) and not isinstance(x, bool)
    return is_real and bool(fp32.tiny <= x <= fp32.max)


def _check_tensors(q: object, k: object, v: object, lengths_differ: bool) -> None:
    tensors = q, k, v
    if classes := [unreadable(x) for x in tensors if unreadable(x)]:
        raise InputError(
            f"attention needs dense tensors of this rank's local tokens; got {classes[0]}, call to_dense(), to_local() "
            "or to_padded_tensor() on it"
        )
    if not _of_four_dims(tensors):
        raise InputError(
            "attention needs q, k and v of shape (batch, local_seq, heads, head_dim); "
            f"got q {shape_of(q)}, k {shape_of(k)}, v {shape_of(v)}"
        )
    _check_shapes(*tensors, lengths_differ)
    check_derivatives(*tensors)


def _of_four_dims(tensors: tuple[object, object, object]) -> TypeGuard[tuple[Tensor, Tensor, Tensor]]:
    return all(isinstance(x, Tensor) and x.dim() == 4 for x in tensors)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, lengths_differ: bool) -> None:
    alike = q.shape[0] == k.shape[0] and (lengths_differ or q.shape[1] == k.shape[1])
    if k.shape[:-1] != v.shape[:-1] or not alike or q.shape[3] != k.shape[3]:
        raise InputError(
            "attention needs k of a shape that differs from q's in the number of heads only, and v of k's but for "
            f"head_dim; got q {shape_of(q)}, k {shape_of(k)}, v {shape_of(v)}"
        )
    if not all(size for x in (q, k, v) for size in (x.shape[0], *x.shape[2:])):
        raise InputError(
            "attention needs at least one sequence, head and head_dim; "
            f"got q {shape_of(q)}, k {shape_of(k)} and v {shape_of(v)} of shape (batch, local_seq, heads, head_dim)"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise InputError(
            f"attention needs q, k and v of one dtype on one device; got {q.dtype} on {q.device}, "
            f"{k.dtype} on {k.device}, {v.dtype} on {v.device}"
        )


def as_heads(q: object, latent: object, expand: object, lengths_differ: bool) -> tuple[Tensor, Tensor]:
    """Return q, padded to head_dim or v_dim, and the latent with its one head. Raise InputError where latent attention
    cannot take these tensors."""
    tensors = q, latent, expand
    if classes := [unreadable(x) for x in tensors if unreadable(x)]:
        raise InputError(f"latent attention needs dense tensors of this rank's local tokens; got {classes[0]}")
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in tensors]
    fits = [len(shape) for shape in shapes] == [4, 3, 3] and all(n for s in shapes for n in (s[0], *s[2:]))
    if fits:
        (rows, tokens, heads, dim), (latent_rows, latent_tokens, width), matrix = shapes
        fits = rows == latent_rows and (lengths_differ or tokens == latent_tokens)
        fits = fits and matrix[:2] == (heads, width) and matrix[2] > dim
    if not fits or not (isinstance(q, Tensor) and isinstance(latent, Tensor) and isinstance(expand, Tensor)):
        raise InputError(
            "latent attention needs q (batch, local_seq, heads, head_dim), latent (batch, local_seq, width) and expand "
            f"(heads, width, head_dim + v_dim); got {', '.join(map(shape_of, tensors))}"
        )
    if len({(x.dtype, x.device) for x in (q, latent, expand)}) > 1:
        got = ", ".join(f"{x.dtype} on {x.device}" for x in (q, latent, expand))
        raise InputError(f"latent attention needs q, latent and expand of one dtype on one device; got {got}")
    check_derivatives(q, latent, expand)
    return padded(q, expand.shape[2] - q.shape[3]), latent.unsqueeze(2)


def sends_latent(
    config: SequenceParallelConfig, q: Tensor, latent: Tensor, expand: Tensor, shards: UnevenShards | None
) -> bool:
    """Return whether a call of latent attention sends its latent. True also for what latent attention will refuse."""
    try:
        as_heads(q, latent, expand, shards is not None)
    except SeqParError:
        return True
    tokens = q.shape[1] * config.size
    if isinstance(shards, UnevenShards):
        tokens = sum(tokens_of(shards, "q", rank) for rank in range(shards.size))
    return config.sends_latent(tokens, *expand.shape)


def unreadable(x: object) -> str:
    """Return words for the class of a tensor whose elements a kernel cannot read, "" for any other object."""
    if not isinstance(x, Tensor):
        return ""
    classes = [base.__name__ for base in type(x).__mro__]
    if "DTensor" in classes or "WholeTensor" in classes:
        return "a DTensor" if "DTensor" in classes else "a whole tensor in parts, whose .local is this rank's own"
    if x.is_nested:
        return "a nested tensor"
    return "" if x.layout == torch.strided else f"a tensor of layout {str(x.layout).removeprefix('torch.')}"


def check_derivatives(*tensors: Tensor) -> None:
    """Raise InputError under forward-mode differentiation and torch.func transforms, which would get no derivative.

    Under torch.compile nothing is checked, since the compiler refuses them by itself.
    """
    if not torch.compiler.is_compiling() and (error := derivatives_error(*tensors)):
        raise error


def derivatives_error(*tensors: Tensor) -> InputError | None:
    """Return the reason why attention cannot be differentiated here as an error. None if it can, or if nothing is
    differentiated."""
    if compat.in_torch_func():
        return InputError(
            "sequence parallel attention takes no torch.func transform (grad, vmap, jvp, ...); got one around it, "
            "use torch.autograd.grad or backward()"
        )
    if compat.forward_level() >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return InputError(
            "sequence parallel attention has no forward-mode derivative; got a dual tensor, use backward()"
        )
    return None


def of_one_head_dim(*tensors: Tensor) -> Sequence[Tensor]:
    """Return the tensors (..., D), each padded with zeros to the largest D. The zeros change no score, and only add
    elements to out."""
    largest = max(x.shape[-1] for x in tensors)
    return [padded(x, largest) for x in tensors]


def check_shares(
    runtime: Runtime, q: Tensor, k: Tensor, mask: Mask, shards: Shards | None, softcap: float = 0.0,
    latent: bool = False,
) -> None:  # fmt: skip
    """Raise ConfigError, InputError or KernelError where heads, length, mask, program or kernel do not fit. The kernel
    is checked here, where other ranks can still be told: its package may be installed on some ranks only."""
    config = runtime.config
    check_heads(config.ulysses, q.shape[2], k.shape[2], size=config.size, head_chunks=config.head_chunks)
    if shards is None:
        check_length(config, q.shape[1] * config.size)
        check_documents(mask, q.shape[1] * config.size)
    else:
        _check_tokens(runtime, q, k, shards)
    check_programs(runtime, q, k, mask, shards, softcap, latent)


def check_programs(
    runtime: Runtime, q: Tensor, k: Tensor, mask: Mask, shards: Shards | None, softcap: float = 0.0,
    latent: bool = False,
) -> None:  # fmt: skip
    """Raise ConfigError or KernelError where this rank has no program or no kernel for its local q and k."""
    chunks = 1 if latent or runtime.config.head_chunks == "auto" else runtime.config.head_chunks
    for direction in ("forward", "backward"):
        runtime.bound(direction, q, k.shape[2], mask, shards, softcap, chunks, latent=k.shape[3] if latent else 0)


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


def shape_of(x: object) -> str:
    """Return the shape of a tensor, or the class of any other object."""
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def describe(x: object) -> str:
    """Return the shape and dtype of a tensor, or the class of any other object."""
    return f"{shape_of(x)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
