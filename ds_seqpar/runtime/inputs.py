"""What attention can be given, checked on this rank and then between ranks, before anything is sent.

Annotations say what a user is meant to give. The checks take what was given, which may be anything (`object`).
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter, functional

from ..compiler.heads import most_stages
from ..compiler.masks import CAUSAL, FULL, Mask
from ..compiler.shards import Shards, UnevenShards, check_parts, members_tokens
from ..config import check_heads, check_length
from ..errors import InputError, SeqParError, as_error
from . import checkpoints
from .agreement import Compared, Fields, agree
from .comm import TorchComm
from .runtime import Runtime


def traceable(runtime: Runtime, q: object, k: object, v: object, asked: Asked) -> bool:
    """Whether a compiler can take the ops: they need the right types, and heads that can be dealt. What else is wrong
    the op finds that asks."""
    tensors = all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v))
    values = isinstance(asked.mask, Mask) and (asked.shards is None or isinstance(asked.shards, UnevenShards))
    numbers = all(x is None or isinstance(x, int | float) for x in (asked.scale, asked.softcap))
    right = tensors and values and numbers and (asked.sinks is None or isinstance(asked.sinks, Tensor))
    return right and _dealable(runtime, q.shape[2], k.shape[2])  # type: ignore[attr-defined]


def _dealable(runtime: Runtime, q_heads: int, kv_heads: int) -> bool:
    degree, stages = runtime.members.degree, runtime.config.head_stages
    if kv_heads < 1 or q_heads % kv_heads or q_heads < degree:
        return False
    return stages == "auto" or stages <= most_stages(q_heads, kv_heads, degree)


def mask_of(causal: bool, mask: Mask | None) -> Mask:
    """The mask that is meant, where `causal` is the short form of one. What cannot be one stays as it is."""
    if mask is not None:
        return mask
    return {True: CAUSAL, False: FULL}[causal] if isinstance(causal, bool) else causal


WHAT = "attention inputs"


class Asked(NamedTuple):
    """What a call of attention asks for beside its tensors. shards None: the configured layout."""

    mask: Mask
    shards: UnevenShards | None
    scale: float | None
    backward: bool = False
    lse: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None


def agree_on_inputs(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> None:
    """Raises InputError, ConfigError, KernelError or DisagreementError on all ranks that share the sequence, where one
    was given what attention cannot take, or other shapes, dtypes or settings than its peers. Collective over them."""
    if torch.compiler.is_compiling():  # no decorator: it imports the compiler, which takes seconds, for everybody
        torch.compiler.disable(agree_on_inputs)(runtime, q, k, v, asked)
        return
    assert isinstance(runtime.comm, TorchComm)  # virtual ranks are of one process, which agrees with itself
    group, error, kind = runtime.comm.groups.control, None, _kind_of(q, k, v, asked)
    if kind is None or runtime.fit is None or runtime.fit[0] != kind:
        error = attention_error(runtime, q, k, v, asked)
        # where there is an error nothing of it may be fit to be shown
        shown = {} if error or group is None else _given(runtime, q, k, v, asked)
        given = Compared(WHAT, shown)
        runtime.fit = None if error or kind is None else (kind, given)
    else:
        given, error = runtime.fit[1], derivatives_error(q, k, v)
    if error is None and group is None:
        return  # nobody to compare with
    # inside torch.func nothing can be sent, not even the refusal of it
    with temporarily_clear_interpreter_stack(), runtime.recorded("agree", WHAT):
        agree(group, WHAT, given, error=error, call="attention", advice=_advice)


def _advice(given: Mapping[int, Fields]) -> str:
    from .causes import of_attention  # of ranks that differ, which few runs see

    return of_attention(given)


def _kind_of(q: object, k: object, v: object, asked: Asked) -> tuple | None:
    """All that the checks look at, but for derivatives: what has the same fits as well. None for what is odd."""
    given = q, k, v, *(() if asked.sinks is None else (asked.sinks,))
    if not all(type(x) in (Tensor, Parameter) and not x.is_nested for x in given):  # some others have no shape
        return None
    kinds = [(x.layout, x.shape, x.dtype, x.device) for x in given]
    # types first: a comparison ends where two differ, and others may be nothing to be compared
    types = [type(x) for x in asked]
    return types, kinds, asked[:-1], checkpoints.which_run()


def _given(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> dict[str, object]:
    """What all ranks must have alike: with uneven shards not the lengths, which the shards give."""
    given: dict[str, object] = {name: describe(x) for name, x in zip("qkv", (q, k, v), strict=True)}
    if asked.shards is not None:
        given = {name: f"{(x.shape[0], *x.shape[2:])} {x.dtype}" for name, x in zip("qkv", (q, k, v), strict=True)}
        given["shards"] = f"of {asked.shards.size} ranks {hash(asked.shards) & 0xFFFFFFFF:08x}"
    given |= {"causal": asked.mask.causal, "scale": asked.scale, "checkpoint": checkpoints.which_run()}
    given |= {"backward": asked.backward, "return_lse": asked.lse}
    if not asked.mask.scale_free:
        given["mask"] = f"{asked.mask} {hash(asked.mask) & 0xFFFFFFFF:08x}"
    if asked.sinks is not None:
        given["sinks"] = describe(asked.sinks)
    return given | ({"softcap": asked.softcap} if asked.softcap is not None else {})


def attention_error(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> SeqParError | None:
    """Why this rank cannot take part in attention over these."""
    try:
        check_arguments(q, k, v, asked.mask, asked.scale, lengths_differ=asked.shards is not None)
        check_softcap(asked.softcap)
        check_sinks(asked.sinks, q)
        if asked.shards is not None:
            check_shards(asked.shards, runtime.compiler.recipe.size, runtime.config.layout)
        q, k, _ = of_one_head_dim(q, k, v)
        check_shares(runtime, q, k, asked.mask, asked.shards, asked.softcap or 0.0)
    except Exception as error:  # a rank that raised alone would leave its peers waiting
        return as_error("attention needs a kernel and a program on every rank; making them failed", error)
    return None


def check_arguments(q: object, k: object, v: object, mask: object, scale: object, lengths_differ: bool = False) -> None:
    """Raises InputError for what attention cannot take on any number of ranks. lengths_differ: k and v may have another
    length than q."""
    try:
        _check_settings(mask, scale)
        _check_tensors(q, k, v, lengths_differ)
    except SeqParError:
        raise
    except Exception as error:  # out of a tensor or a number of an odd kind
        raise as_error(
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
    """Raises InputError for what scores cannot be capped with."""
    if softcap is not None and not _is_positive(softcap):
        raise InputError(f"attention needs a softcap that is a number above 0 (in fp32), or None; got {softcap!r:.80}")


def check_sinks(sinks: object, q: Tensor) -> None:
    """Raises InputError for what are not sinks of all of q's heads."""
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
    """Whether it is a number above 0 in fp32. Below these a kernel has 0, and 0 times a mask's -inf is no number; above
    them infinity."""
    fp32, real = torch.finfo(torch.float32), isinstance(x, numbers.Real) and not isinstance(x, bool)
    return real and bool(fp32.tiny <= x <= fp32.max)


def _check_tensors(q: object, k: object, v: object, lengths_differ: bool) -> None:
    given = q, k, v
    if wrong := [_kind(x) for x in given if _kind(x)]:
        raise InputError(
            f"attention needs dense tensors of this rank's own tokens; got {wrong[0]}, call to_dense(), to_local() or "
            "to_padded_tensor() on it"
        )
    if not _of_four_dims(given):
        raise InputError(
            "attention needs q, k and v of shape (batch, local_seq, heads, head_dim); "
            f"got q {shape_of(q)}, k {shape_of(k)}, v {shape_of(v)}"
        )
    _check_shapes(*given, lengths_differ)
    check_derivatives(*given)


def _of_four_dims(given: tuple[object, object, object]) -> TypeGuard[tuple[Tensor, Tensor, Tensor]]:
    return all(isinstance(x, Tensor) and x.dim() == 4 for x in given)


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


def _kind(x: object) -> str:
    """What kind of tensor it is, where that is one whose elements a kernel cannot read; else nothing."""
    if not isinstance(x, Tensor):
        return ""
    if any(base.__name__ == "DTensor" for base in type(x).__mro__):
        return "a DTensor"
    if x.is_nested:
        return "a nested tensor"
    return "" if x.layout == torch.strided else f"a tensor of layout {str(x.layout).removeprefix('torch.')}"


def check_derivatives(*tensors: Tensor) -> None:
    """Raises InputError under forward-mode differentiation and torch.func transforms, which would see no derivative.

    Under torch.compile nothing is asked: the compiler refuses them by itself.
    """
    if not torch.compiler.is_compiling() and (error := derivatives_error(*tensors)):
        raise error


def derivatives_error(*tensors: Tensor) -> InputError | None:
    """Why these cannot be differentiated as they are meant to be."""
    if torch._C._are_functorch_transforms_active():
        return InputError(
            "sequence parallel attention takes no torch.func transform (grad, vmap, jvp, ...); got one around it, "
            "use torch.autograd.grad or backward()"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return InputError(
            "sequence parallel attention has no forward-mode derivative; got a dual tensor, use backward()"
        )
    return None


def of_one_head_dim(*tensors: Tensor) -> Sequence[Tensor]:
    """With zeros beside those that have fewer elements a head, which change no score and no other element of out."""
    most = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == most else functional.pad(x, (0, most - x.shape[-1])) for x in tensors]


def check_shares(
    runtime: Runtime, q: Tensor, k: Tensor, mask: Mask, shards: Shards | None, softcap: float = 0.0
) -> None:
    """Heads, length, kernel and program. The kernel here, where the others can still be told: what it needs may be
    installed on some ranks only."""
    config, members = runtime.config, runtime.config.ulysses
    check_heads(members, q.shape[2], k.shape[2], size=config.size, stages=config.head_stages)
    if shards is None:
        check_length(config, q.shape[1] * config.size)
        check_documents(mask, q.shape[1] * config.size)
    else:
        _check_tokens(runtime, q, k, shards)
    check_programs(runtime, q, k, mask, runtime.shards(q.shape[1] * members) if shards is None else shards, softcap)


def check_programs(runtime: Runtime, q: Tensor, k: Tensor, mask: Mask, shards: Shards, softcap: float = 0.0) -> None:
    """Raises ConfigError or KernelError where this rank has no program or no kernel for its own q and k."""
    for direction in ("forward", "backward"):
        runtime.bound(direction, q, k.shape[2], mask, shards, softcap)


def check_documents(mask: Mask, seq: int) -> None:
    """Raises InputError for documents that begin after `seq` tokens."""
    if mask.documents and mask.documents[-1] >= seq:
        raise InputError(
            f"a mask's documents must begin within the sequence of {seq} tokens; got one at {mask.documents[-1]}, "
            "give first positions in the whole sequence, not in a rank's part of it"
        )


def check_shards(shards: object, size: int, layout: str) -> None:
    """Raises InputError for what are not shards of so many inner ranks, of as many blocks each as in the layout."""
    if not isinstance(shards, UnevenShards):
        got = type(shards).__name__
        raise InputError(f"attention needs shards that are UnevenShards, or None for the configured layout; got {got}")
    if shards.size != size:
        raise InputError(f"attention needs shards of the {size} inner ranks; got some of {shards.size} ranks")
    check_parts(shards, layout)


def _check_tokens(runtime: Runtime, q: Tensor, k: Tensor, shards: Shards) -> None:
    count, member = runtime.members
    wanted = [members_tokens(shards, side, runtime.rank, count)[member] for side in ("q", "kv")]
    if [q.shape[1], k.shape[1]] != wanted:
        raise InputError(
            f"attention needs the tokens that the shards give this rank, {wanted[0]} of q and {wanted[1]} of k and v; "
            f"got {q.shape[1]} and {k.shape[1]}"
        )


def shape_of(x: object) -> str:
    """The shape of a tensor, or what it is instead."""
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def describe(x: object) -> str:
    """Shape and dtype of a tensor, or what it is instead."""
    return f"{shape_of(x)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
