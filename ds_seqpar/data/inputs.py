"""Declarations of how the ranks that share a sequence divide each named model input.

Input shapes are never used to guess a declaration. A batch may contain the names in `INPUTS`, names declared by a
patched model's library, and names that a user declares, as in `inputs={"weights": tokens()}`. Any other tensor raises
an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

from ..base.errors import ConfigError
from .documents import CUMULATIVE, IMPLIED, NUMBERED
from .value_checks import describe

Divide = Callable[[Any, Mapping[str, Any], Tensor], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputSpec:
    """Declaration of how ranks divide an input, returned by `tokens`, `row`, `replicated`, `own` and `refused`."""

    kind: Literal["tokens", "row", "replicated", "own", "layout", "refused"]
    dim: int = 1  # dimension of the tokens, directly after the rows; 0 for inputs with one entry per row
    fill: float | None = None  # None: entries stay with their tokens; otherwise, entries are shifted with the labels
    divide: Divide | None = None
    sentence: str = ""


def tokens(dim: int = 1, *, shifted: bool = False, padding: float = 0) -> InputSpec:
    """Declare an input with one entry per token. The input is sharded like the tokens.

    Args:
        dim: Dimension of the tokens, at least 1; the preceding dimension contains the rows.
        shifted: Whether an entry belongs to a label, such as a loss weight. A shifted entry moves to the token that
            predicts the label, like `shift_labels`.
        padding: Entry for the last token of a document, which predicts nothing. `padding` is used only if `shifted` is
            True.
    """
    if type(dim) is not int or dim < 1:
        raise ConfigError(f"tokens needs a dim of 1 or more, behind that of rows; got {dim!r:.80}")
    return InputSpec(kind="tokens", dim=dim, fill=padding if shifted else None)


def row() -> InputSpec:
    """Declare an input with one entry per row, of shape (rows, ...).

    The input is unchanged unless rows are concatenated. If rows are concatenated, the input's shape becomes (1, local
    tokens, ...), and each token gets the entry of its row.
    """
    return InputSpec(kind="row", dim=0)


def replicated() -> InputSpec:
    """Declare an input that every rank receives as a whole."""
    return InputSpec(kind="replicated")


def own(divide: Divide) -> InputSpec:
    """Declare an input that is divided by a custom function, such as images flattened over the batch.

    Args:
        divide: Function that returns this rank's part of the input. The arguments are the input, the whole batch by
            name, and this rank's tokens. The tokens are given as an int64 CPU tensor of shape (all local tokens,) that
            contains each token's number `row * tokens + token`, in the order of this rank's shard.
    """
    return InputSpec(kind="own", divide=divide)


def refused(sentence: str) -> InputSpec:
    """Declare an input that raises an error.

    Args:
        sentence: Error message of the form "needs X; got {}, do Z", in which {} stands for the input's name.
    """
    return InputSpec(kind="refused", sentence=sentence)


LAYOUT = InputSpec(kind="layout")  # for inputs that mark padding and documents; shards get their own version
INPUTS: Mapping[str, InputSpec] = {
    **dict.fromkeys(("input_ids", "inputs_embeds", "labels", "shift_labels"), tokens()),
    **dict.fromkeys(("attention_mask", "position_ids", *CUMULATIVE, *NUMBERED, *IMPLIED), LAYOUT),
    "num_items_in_batch": replicated(),
}


def joined(*tables: Mapping[str, InputSpec] | None) -> dict[str, InputSpec]:
    """Merge declarations into one table. Raise ConfigError if two declarations of the same name differ."""
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
    """Return the error message for the first unsupported input, or "" if all inputs are supported."""
    refused = (name for name, x in inputs.items() if x is not None and name in table and table[name].sentence)
    return next((table[name].sentence.format(name) for name in refused), "")
