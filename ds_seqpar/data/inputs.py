"""Declared inputs: how the ranks of a sequence share each input that a model is called with, by name.

Nothing is guessed from shapes. A batch may contain the names in `INPUTS`, the names of a patched model's library, and
names that a user declares, as in `inputs={"weights": tokens()}`. Any other tensor is refused.
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
    """How ranks share an input: what `tokens`, `row`, `replicated`, `own` and `refused` return."""

    kind: Literal["tokens", "row", "replicated", "own", "layout", "refused"]
    dim: int = 1  # of the tokens, behind that of rows; else that of rows
    fill: float | None = None  # None: it stays with its token; else it is shifted with labels
    divide: Divide | None = None
    sentence: str = ""


def tokens(dim: int = 1, *, shifted: bool = False, padding: float = 0) -> InputSpec:
    """Declare an input with an entry for each token; the entry goes where its token goes.

    Args:
        dim: the dim of the tokens, 1 or more; rows are on the dim before it.
        shifted: whether an entry belongs to a label, such as the weight of its loss. If so, it is moved to the token
            that predicts the label, like `shift_labels`.
        padding: the entry of a token that predicts nothing, at the end of a document; read only if `shifted`.
    """
    if type(dim) is not int or dim < 1:
        raise ConfigError(f"tokens needs a dim of 1 or more, behind that of rows; got {dim!r:.80}")
    return InputSpec(kind="tokens", dim=dim, fill=padding if shifted else None)


def row() -> InputSpec:
    """Declare an input with an entry for each row, (rows, ...).

    It stays as it is, unless rows lie end to end. Then it becomes (1, local tokens, ...): each token gets its row's
    entry.
    """
    return InputSpec(kind="row", dim=0)


def replicated() -> InputSpec:
    """Declare an input that every rank receives whole."""
    return InputSpec(kind="replicated")


def own(divide: Divide) -> InputSpec:
    """Declare an input that a function divides, such as pictures flattened over the batch.

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
    """Return declarations as one table. Raises ConfigError if two of them differ for the same name."""
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
    """Return the sentence of the first input whose name is refused; "" if there is none."""
    refused = (name for name, x in inputs.items() if x is not None and name in table and table[name].sentence)
    return next((table[name].sentence.format(name) for name in refused), "")
