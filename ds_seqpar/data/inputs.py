"""Declared inputs: how the ranks of a sequence share what a model is called with, name by name.

Nothing is guessed from shapes. A batch may have the names of `INPUTS`, those of a patched model's library, and what a
user declares as `inputs={"weights": tokens()}`. Any other tensor is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..base.compat import tree_leaves
from ..base.errors import ConfigError, InputError
from .batch_layout import BatchLayout
from .documents import CUMULATIVE, IMPLIED, NUMBERED, Lengths
from .value_checks import describe

Divide = Callable[[Any, Mapping[str, Any], Tensor], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputSpec:
    """How ranks share an input: what `tokens`, `row`, `replicated`, `own` and `refused` return."""

    kind: Literal["tokens", "row", "replicated", "own", "layout", "refused"]
    dim: int = 1  # of the tokens, behind that of rows; else that of rows
    fill: float | None = None  # None: it stays with its token; else it is shifted with labels
    divide: Divide | None = None
    sentence: str = ""


def tokens(dim: int = 1, *, shifted: bool = False, padding: float = 0) -> InputSpec:
    """Declare an input with an entry for each token, which goes where its token goes.

    Args:
        dim: the dim of the tokens, 1 or more; rows are on the dim before it.
        shifted: whether an entry belongs to a label, as the weight of its loss. Then it is moved as `shift_labels` are,
            to the token that predicts the label.
        padding: the entry of a token that predicts nothing, at the end of a document; read where `shifted`.
    """
    if type(dim) is not int or dim < 1:
        raise ConfigError(f"tokens needs a dim of 1 or more, behind that of rows; got {dim!r:.80}")
    return InputSpec(kind="tokens", dim=dim, fill=padding if shifted else None)


def row() -> InputSpec:
    """Declare an input with an entry for each row, (rows, ...).

    It stays as it is. But where rows lie end to end it becomes (1, local tokens, ...): each token gets its row's.
    """
    return InputSpec(kind="row", dim=0)


def replicated() -> InputSpec:
    """Declare an input that every rank gets whole."""
    return InputSpec(kind="replicated")


def own(divide: Divide) -> InputSpec:
    """Declare an input of which a function returns this rank's part, such as pictures flat over the batch.

    Args:
        divide: (the input, the whole batch by name, which tokens this rank has) -> this rank's part. The tokens are
            int64 (all local tokens,) on the CPU, numbered row * tokens + token, in the order of this rank's shard.
    """
    return InputSpec(kind="own", divide=divide)


def refused(sentence: str) -> InputSpec:
    """Declare an input that is refused. sentence: "needs X; got {}, do Z", with {} for the input's name."""
    return InputSpec(kind="refused", sentence=sentence)


LAYOUT = InputSpec(kind="layout")  # says where padding and documents lie, and is replaced by what shards have of it
INPUTS: Mapping[str, InputSpec] = {
    **dict.fromkeys(("input_ids", "inputs_embeds", "labels", "shift_labels"), tokens()),
    **dict.fromkeys(("attention_mask", "position_ids", *CUMULATIVE, *NUMBERED, *IMPLIED), LAYOUT),
    "num_items_in_batch": replicated(),
}


def joined(*tables: Mapping[str, InputSpec] | None) -> dict[str, InputSpec]:
    """Return declarations as one table. Raises ConfigError where two say different things of a name."""
    table: dict[str, InputSpec] = {}
    for declared in tables:
        if not isinstance(declared, Mapping | None):
            raise ConfigError(f"inputs must be declared by name, as {{'weights': tokens()}}; got {describe(declared)}")
        for name, spec in (declared or {}).items():
            if not isinstance(spec, InputSpec):
                got = f"{type(spec).__name__} for {name!r:.80}"
                raise ConfigError(f"an input is declared by tokens(), row(), replicated() or own(divide); got {got}")
            if table.setdefault(name, spec) != spec:
                raise ConfigError(
                    f"an input must be declared in one way; got {name} as {spec.kind} and as {table[name].kind}, "
                    "leave one of them out, or call your input by another name"
                )
    return table


def refusal(table: Mapping[str, InputSpec], inputs: Mapping[str, Any]) -> str:
    """Return the sentence of the first input that is refused by its name; "" where none is."""
    refused = (name for name, x in inputs.items() if x is not None and name in table and table[name].sentence)
    return next((table[name].sentence.format(name) for name in refused), "")


@dataclasses.dataclass(frozen=True)
class Part:
    """Which tokens of a whole batch of rows x seq this rank has."""

    sp: Any  # the Sharding
    rows: int
    seq: int
    segments: Lengths | None  # tokens of each document and stretch of padding; None: each row is one document
    placement: BatchLayout | None  # None where the configured layout is enough

    def of(self, table: Mapping[str, InputSpec], batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a batch, without what says where documents lie. It does not communicate.

        Raises:
            InputError: for an input that is refused, is no tensor of its declared kind, or is not declared.
        """
        if wrong := refusal(table, batch):
            raise InputError(wrong)
        specs = {name: table.get(name) or _undeclared(name, x) for name, x in batch.items()}
        return {name: self._of(specs[name], name, x, batch) for name, x in batch.items() if specs[name] != LAYOUT}

    def _of(self, spec: InputSpec, name: str, x: Any, batch: Mapping[str, Any]) -> Any:
        if x is None or spec.kind == "replicated":
            return x
        if spec.divide is not None:
            return spec.divide(x, batch, self._held())
        dim, is_joined = spec.dim, self.placement is not None and self.placement.rows is not None
        first, expected = max(dim - 1, 0), (self.rows, self.seq) if dim else (self.rows,)
        if not isinstance(x, Tensor) or tuple(x.shape[first : dim + 1]) != expected:
            raise InputError(
                f"{name} must be a tensor with an entry for each {'token' if dim else 'row'}, {expected} from dim "
                f"{first} on; got {describe(x)}, give it so, or declare it as what it is"
            )
        if not dim and not is_joined:
            return x
        if not dim:
            x, dim = x[:, None].expand(-1, self.seq, *x.shape[1:]), 1
        return self.sp.shard(x if spec.fill is None else self.shifted(x, dim, spec.fill), dim, self.placement)

    def shifted(self, x: Tensor, dim: int, fill: float) -> Tensor:
        """Return (..., rows, seq, ...), each entry moved to the token before; fill: the entry of a document's last.

        dim: that of the tokens.
        """

        def ends() -> Tensor:
            last = torch.tensor(self.segments or (self.seq,) * self.rows, device="cpu").cumsum(0) - 1
            is_last = torch.zeros(self.rows * self.seq, dtype=torch.bool, device="cpu").index_fill_(0, last, True)
            return is_last.view(self.rows, self.seq)

        is_last = self.sp.layout_tensors.get(("ends", self.rows, self.seq, self.segments), x.device, ends)
        return x.roll(-1, dim).masked_fill(is_last.view(*is_last.shape, *[1] * (x.dim() - dim - 1)), fill)

    def _held(self) -> Tensor:
        held = self.sp.held(self.seq, self.placement, self.sp.rank)
        if self.placement is not None and self.placement.rows is not None:
            return held
        return (torch.arange(self.rows, device="cpu")[:, None] * self.seq + held).flatten()


def _undeclared(name: str, x: Any) -> InputSpec:
    """Return the declaration of an input that has none, which only numbers and objects need not have."""
    if all(not isinstance(leaf, Tensor) or not leaf.dim() for leaf in tree_leaves(x)):
        return replicated()
    raise InputError(
        f"ranks that share sequences need to know how they share each input; got {name} {describe(x)}, which nothing "
        f"declares, pass inputs={{'{name}': tokens()}} to shard_batches, share_sequences or patch_attention: tokens, "
        "or tokens(shifted=True) as labels are, row, replicated or own (ds_seqpar.data.inputs)"
    )
