"""Read the document boundaries of a batch from every format that collators use.

All formats in a batch must mark the same documents. A batch's rows are treated as concatenated: position `row * seq +
i` in the batch is token i of row `row`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InputError

Lengths = tuple[int, ...]  # number of tokens in each document of a batch, in order; no document spans two rows
CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
NUMBERED = ("seq_idx", "document_ids")
# lengths that some collators add, but that do not locate documents
IMPLIED = ("max_length_q", "max_length_k", "max_seqlen", "seq_lengths")
READ = {"attention_mask", "position_ids", *CUMULATIVE, *NUMBERED}  # inputs that determine how tokens are sharded


def documents_of(batch: Mapping[str, Any], rows: int, seq: int) -> Lengths | None:
    """Return the length of each document in a batch of `rows` sequences of `seq` tokens.

    Args:
        batch: Inputs by name, which may mark documents in any of these formats: - `position_ids` that restart from 0:
            (rows, seq), (1, seq) or (seq,), or position ids with four axes, of which the first axis is read; -
            cumulative lengths `cu_seq_lens_q`, `cu_seq_lens_k` or `cu_seqlens`: int, (documents + 1,);
            - a document number per token, `seq_idx` or `document_ids`: int, (rows, seq).
        rows: Number of sequences in the batch.
        seq: Number of tokens in each sequence.

    Returns:
        Number of tokens in each document, in order, or None if each row is one document.

    Raises:
        InputError: An input is malformed, or several formats disagree, for example because the cumulative lengths
            belong to another batch.
    """
    lengths: dict[str, Lengths] = {}
    readers: list[tuple[tuple[str, ...], Callable]] = [
        (("position_ids",), _restarts), (CUMULATIVE, _cumulative), (NUMBERED, _numbered)
    ]  # fmt: skip
    for names, read in readers:
        for name in names:
            if batch.get(name) is not None:
                lengths[name] = read(name, batch[name], rows, seq)
    if not lengths and (only := [name for name in IMPLIED if batch.get(name) is not None]):
        raise InputError(
            f"documents must be said by position_ids that begin again with each, or by {CUMULATIVE[0]}; got {only[0]} "
            "alone, give one of these too"
        )
    if not lengths:
        return None
    first, *other_names = lengths
    for name in other_names:
        if lengths[name] != lengths[first]:
            raise InputError(
                f"documents must be the same in all that says where they are; got {len(lengths[first])} in {first} and "
                f"{len(lengths[name])} others in {name}, give one of them (cumulative lengths may be another batch's)"
            )
    return None if lengths[first] == (seq,) * rows else lengths[first]


def _restarts(name: str, positions: object, rows: int, seq: int) -> Lengths:
    values = _integers(name, positions)
    values = values[0] if values.dim() == 3 and len(values) == 4 else values
    if values.shape not in ((seq,), (1, seq), (rows, seq)):
        raise InputError(
            f"position_ids must be of shape ({rows}, {seq}); got {tuple(values.shape)}, give such, or none where each "
            "row is one document"
        )
    flat = values.expand(rows, seq) if values.dim() < 2 or values.shape[0] != rows else values
    begins = torch.ones_like(flat, dtype=torch.bool)
    begins[:, 1:] = flat[:, 1:] != flat[:, :-1] + 1
    if len(skips := (begins & (flat != 0)).nonzero()):
        row, token = skips[0].tolist()
        raise InputError(
            "position_ids must count 0, 1, 2, ... through every sequence, or through every document of it, without "
            f"skips (PoSE); got {int(flat[row, token])} at token {token} of row {row}, give such, or none where each "
            "row is one document, and beside a rank's shard all that sp.shard_batches returns for it"
        )
    return _lengths_of(begins.flatten().nonzero().flatten().tolist(), rows * seq)


def _numbered(name: str, numbers: object, rows: int, seq: int) -> Lengths:
    values = _integers(name, numbers)
    if values.shape != (rows, seq):
        raise InputError(
            f"{name} must be of shape ({rows}, {seq}); got {tuple(values.shape)}, give each token its document's number"
        )
    begins = torch.ones_like(values, dtype=torch.bool)
    begins[:, 1:] = values[:, 1:] != values[:, :-1]
    return _lengths_of(begins.flatten().nonzero().flatten().tolist(), rows * seq)


def _cumulative(name: str, lengths: object, rows: int, seq: int) -> Lengths:
    # some collators repeat the last length
    ends = [end for end, _ in itertools.groupby(_integers(name, lengths).flatten().tolist())]
    ascending = all(a < b for a, b in itertools.pairwise(ends))
    if len(ends) < 2 or ends[0] != 0 or not ascending or ends[-1] > rows * seq:
        raise InputError(
            f"{name} must ascend from 0 to the batch's {rows * seq} tokens; got {str(ends)[:60]}, give those of this "
            "batch"
        )
    if ends[-1] < rows * seq:
        # padding after the last document counts as one more document per row
        ends += [*range(-(-(ends[-1] + 1) // seq) * seq, rows * seq, seq), rows * seq]
    if crossed := [end for end in range(seq, rows * seq, seq) if end not in ends]:
        raise InputError(
            f"documents must end where their row does; got a document in {name} that goes on past token {crossed[0]}, "
            f"where a row of {seq} tokens ends; put each document wholly in one row"
        )
    return _lengths_of(ends[:-1], rows * seq)


def _lengths_of(starts: list[int], end: int) -> Lengths:
    return tuple(b - a for a, b in itertools.pairwise([*starts, end]))


def _integers(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name} must be a tensor of whole numbers; got {got}, make one with dtype=torch.int64")
    return x.detach().cpu()
