"""Operators, which define the tensors that attention checks, sends and uses.

An add-on can define its own `Operator` and register it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from ...base import compat
from ...base.errors import InputError
from ..compiler.program.shape import Shape
from ..compiler.program.shape import shape_of as shape_of_heads
from .buffers import Tensors
from .dense import Backward, Forward


class Operator:
    """The operator for attention over keys and values. Subclasses define other operators.

    Attributes:
        name: Name used in messages and in compiled graphs.
        operands: Names of q and of the key/value tensors; the key/value tensors are in the order of the shape's `kv`.
            Operands are local tensors (B, s, heads, width), and their blocks are sent between ranks.
        parameters: Names of further tensors, which are complete on every rank and have q's heads in dim 0. The
            parameters' gradients must be summed over ranks.
        dims: Number of dims of each tensor, as passed by the caller.
        is_linear: Whether adding a vector to all keys adds the vector's product with q to the scores. If so, the vector
            can be subtracted (see `dense`).
        kind: Class of the shape.
        forward: Class that computes the blocks of a head chunk.
        backward: Class that computes the gradients of a head chunk's blocks.
    """

    name = "attention"
    operands: tuple[str, ...] = ("q", "k", "v")
    parameters: tuple[str, ...] = ()
    dims: tuple[int, ...] = (4, 4, 4)
    is_linear = True
    kind: type[Shape] = Shape
    forward: type[Forward] = Forward
    backward: type[Backward] = Backward

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return self.operands + self.parameters

    def has_common(self, dtype: torch.dtype) -> bool:
        """Return whether the forward results contain the keys' common part, which is 0 if nothing was subtracted.

        The result depends only on the dtype, because torch.compile needs the result without the mask.
        """
        return self.is_linear and dtype == torch.float32

    def check_options(self, options: Any) -> None:
        """Raise InputError if the `AttentionOptions` are not supported."""

    def check(self, tensors: Sequence[Any], lengths_differ: bool) -> None:
        """Raise InputError if the operator does not support the tensors on any number of ranks.

        Args:
            tensors: The user's arguments, which may be any objects.
            lengths_differ: Whether k and v may differ from q in length.
        """
        if classes := [unreadable(x) for x in tensors if unreadable(x)]:
            raise InputError(
                f"{self.name} needs dense tensors of this rank's local tokens; got {classes[0]}, call to_dense(), "
                "to_local() or to_padded_tensor() on it"
            )
        self.check_shapes(tensors, lengths_differ)
        if len({(x.dtype, x.device) for x in tensors}) > 1:
            got = ", ".join(f"{x.dtype} on {x.device}" for x in tensors)
            names = f"{', '.join(self.inputs[:-1])} and {self.inputs[-1]}"
            raise InputError(f"{self.name} needs {names} of one dtype on one device; got {got}")
        check_derivatives(*tensors)

    def check_shapes(self, tensors: Sequence[Any], lengths_differ: bool) -> None:
        """Raise InputError if an object is not a tensor or has an unsupported shape."""
        q, k, v = tensors
        if not all(isinstance(x, Tensor) and x.dim() == 4 for x in tensors):
            raise InputError(
                "attention needs q, k and v of shape (batch, local_seq, heads, head_dim); "
                f"got q {shape_of(q)}, k {shape_of(k)}, v {shape_of(v)}"
            )
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

    def prepare(self, tensors: Sequence[Tensor]) -> tuple[Tensors, int]:
        """Return the tensors in the form that kernels need (operands with 4 dims), and the width of out."""
        return tuple(of_one_head_dim(*tensors)), tensors[-1].shape[-1]

    def shapes_of(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shapes of all prepared tensors, given a flat list of their sizes."""
        sizes, dims = iter(numbers), (*[4] * len(self.operands), *self.dims[len(self.operands) :])
        return [tuple(next(sizes) for _ in range(n)) for n in dims]

    def shape(self, comm_dtype: str, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> Shape:
        """Return the shape of a rank's local tensors, given the `comm_dtype` setting, q's dtype and the shapes of all
        tensors.
        """
        (batch, _, q_heads, dim), (_, _, kv_heads, _), *_ = shapes
        name, heads = str(dtype).removeprefix("torch."), (q_heads, kv_heads, dim)
        return shape_of_heads(comm_dtype, name, batch, heads, self.kind, **self.widths(shapes))

    def widths(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the attributes that `kind` has in addition to the attributes of `Shape`."""
        return {}


OPERATORS: dict[str, Operator] = {}  # by name


def register(operator: Operator) -> Operator:
    """Register an operator for compiled graphs, which contain only its name. Call this function on every rank."""
    OPERATORS[operator.name] = operator
    return operator


DENSE = register(Operator())


def unreadable(x: object) -> str:
    """Describe the class of a tensor if a kernel cannot read the tensor's elements, or return "" for any other
    object.
    """
    if not isinstance(x, Tensor):
        return ""
    classes = [base.__name__ for base in type(x).__mro__]
    if "DTensor" in classes or "WholeTensor" in classes:
        return "a DTensor" if "DTensor" in classes else "a whole tensor in parts, whose .local is this rank's own"
    if x.is_nested:
        return "a nested tensor"
    return "" if x.layout == torch.strided else f"a tensor of layout {str(x.layout).removeprefix('torch.')}"


def check_derivatives(*tensors: Tensor) -> None:
    """Raise InputError under forward-mode differentiation and torch.func transforms, neither of which attention
    supports.

    Nothing is checked under torch.compile, since the compiler itself rejects unsupported kinds of differentiation.
    """
    if not torch.compiler.is_compiling() and (error := derivatives_error(*tensors)):
        raise error


def derivatives_error(*tensors: Tensor) -> InputError | None:
    """Return an error if attention is called under an unsupported kind of differentiation, otherwise None."""
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
    """Return the tensors (..., D), each padded with zeros to the largest D.

    Padding with zeros does not change the scores, and only adds elements to out.
    """
    largest = max(x.shape[-1] for x in tensors)
    return [padded(x, largest) for x in tensors]


def padded(x: Tensor, dim: int) -> Tensor:
    """Return x (..., D) padded with zeros to `dim`, or x itself if D is at least `dim`."""
    return x if x.shape[-1] >= dim else functional.pad(x, (0, dim - x.shape[-1]))


def shape_of(x: object) -> str:
    """Return the shape of a tensor, or the class of any other object."""
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def describe(x: object) -> str:
    """Return the shape and dtype of a tensor, or the class of any other object."""
    return f"{shape_of(x)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
