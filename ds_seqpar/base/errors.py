"""Errors caused by user input. Each message is one sentence with the requirement, the actual value and the remedy."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable, Sequence

SECTION = "sequence_parallel"  # section of the DeepSpeed JSON that contains all settings named in messages
MOST_SHOWN = 4  # maximum number of fields, groups of ranks or runs of ranks named in a sentence


class SeqParError(ValueError):
    """Base class for all errors that ds_seqpar raises because of user input."""


class ConfigError(SeqParError):
    """Raised if a setting does not exist, or conflicts with other settings, the machine, or the model."""


class InputError(SeqParError):
    """Raised if sequence-parallel attention cannot process a tensor or a batch."""


class PlanError(SeqParError):
    """Raised if a plan cannot be read, computes a wrong result or hangs.

    The message shows the steps around the faulty step.
    """


class KernelError(SeqParError):
    """Raised if no attention kernel can compute the blocks. The message lists every kernel's reasons."""


class DisagreementError(SeqParError):
    """Raised on all ranks if values that must be equal differ between ranks, or if any rank cannot continue."""


class CommunicationError(SeqParError, RuntimeError):
    """Raised if communication fails because a rank has exited or has not joined an operation.

    If a plan was running, the message includes the current step and a table of the plan.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return text such as ` (did you mean 'zigzag'?)`, or "" if no known word is similar."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{match[0]}'?)" if match else ""


def quoted_list(names: Iterable[str], last: str = "or") -> str:
    """Return the names in the form `"a"`, `"a" or "b"`, or `"a", "b" or "c"`."""
    *most, end = (f'"{name}"' for name in names)
    return f"{', '.join(most)} {last} {end}" if most else end


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return text such as `rank 3` or `ranks 0-2, 5`. Long lists of scattered ranks are abbreviated."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:MOST_SHOWN])
    omitted = sum(len(run) for run in runs[MOST_SHOWN:])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {omitted} more" if omitted else "")


def check_choice(subject: str, value: str, known: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is in `known`. The message suggests the most similar choice."""
    known = sorted(known)
    if value not in known:
        raise ConfigError(
            f"{subject} must be one of {', '.join(known)}; got {value!r}{did_you_mean(str(value), known)}"
        )


def as_seqpar_error(action: str, reason: Exception) -> SeqParError:
    """Convert an exception to a SeqParError that ranks can exchange.

    Args:
        action: A clause, such as "loading data failed".
    """
    is_of_worker = "Original Traceback" in str(reason)  # for a data-loading worker, torch reports only text
    if isinstance(reason, SeqParError) and not is_of_worker:
        return reason
    sentence = re.split(r"[.!?]\s+(?=[A-Z])", " ".join(str(reason).split()))[0]  # the full text remains in __cause__
    found = f", {type(reason).__name__}: {sentence}"
    if is_of_worker:
        found = f" in a worker, {str(reason).strip().splitlines()[-1]}"
    error = InputError(f"{action}{found}")
    error.__cause__ = reason
    return error


def whole_number(x: object) -> int | None:
    """Convert a Python, NumPy or torch integer to an int. Return None for booleans and for all other values."""
    if type(x) is int:
        return x
    try:
        number = operator.index(x)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a tensor with several elements raises ValueError or RuntimeError
        return None
    return None if "bool" in str(getattr(x, "dtype", type(x))) else number
