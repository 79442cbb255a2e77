"""Errors that a user can cause. Each message is one sentence: what is needed, what was given, and what to do."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable, Sequence

SECTION = "sequence_parallel"  # of the DeepSpeed JSON: it holds every setting that a message names
MOST_SHOWN = 4  # fields, groups of ranks and runs of rank numbers that a sentence names at most


class SeqParError(ValueError):
    """Base class of every error that ds_seqpar raises because of a user's input."""


class ConfigError(SeqParError):
    """Raised when a setting does not exist, or does not fit the other settings, the machine or the model."""


class InputError(SeqParError):
    """Raised when sequence parallel attention cannot take a tensor or a batch as it is."""


class PlanError(SeqParError):
    """Raised when a plan cannot be read, computes a wrong result or hangs; the message shows the steps around the wrong
    one.
    """


class KernelError(SeqParError):
    """Raised when no attention kernel can take the blocks; the message has the reasons of every kernel."""


class DisagreementError(SeqParError):
    """Raised on all ranks when values that must be equal differ between ranks, or one rank cannot continue."""


class CommunicationError(SeqParError, RuntimeError):
    """Raised when ranks could not communicate, because one ended or did not arrive.

    If a plan was running, the message has the step and the plan's table.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'zigzag'?)`, or nothing if no known word is near."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{match[0]}'?)" if match else ""


def quoted_list(names: Iterable[str], last: str = "or") -> str:
    """Return `"a"`, `"a" or "b"`, or `"a", "b" or "c"`."""
    *most, end = (f'"{name}"' for name in names)
    return f"{', '.join(most)} {last} {end}" if most else end


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`; long lists of scattered ranks are shortened."""
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
    """Raise ConfigError unless `value` is one of `known`; the message suggests the nearest legal value."""
    known = sorted(known)
    if value not in known:
        raise ConfigError(
            f"{subject} must be one of {', '.join(known)}; got {value!r}{did_you_mean(str(value), known)}"
        )


def as_seqpar_error(action: str, reason: Exception) -> SeqParError:
    """Return an exception as a SeqParError, which ranks can send to one another.

    Args:
        action: A clause, such as "loading data failed".
    """
    is_of_worker = "Original Traceback" in str(reason)  # which loads data, and of which torch gives no more
    if isinstance(reason, SeqParError) and not is_of_worker:
        return reason
    sentence = re.split(r"[.!?]\s+(?=[A-Z])", " ".join(str(reason).split()))[0]  # the cause has the whole text
    found = f", {type(reason).__name__}: {sentence}"
    if is_of_worker:
        found = f" in a worker, {str(reason).strip().splitlines()[-1]}"
    error = InputError(f"{action}{found}")
    error.__cause__ = reason
    return error


def whole_number(x: object) -> int | None:
    """Return x as an int if it is a Python, NumPy or torch integer. Return None for anything else, including True and
    False.
    """
    if type(x) is int:
        return x
    try:
        number = operator.index(x)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises the others
        return None
    return None if "bool" in str(getattr(x, "dtype", type(x))) else number
