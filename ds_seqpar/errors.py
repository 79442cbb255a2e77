"""Errors that a user can cause. Each message is one sentence: what is needed, what was given, what to do."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable, Sequence

SECTION = "sequence_parallel"  # of the DeepSpeed JSON: where every setting stands that a message names
MOST_SHOWN = 4  # fields, groups of ranks and runs of rank numbers that a sentence names at most


class SeqParError(ValueError):
    """Base of every error that ds_seqpar raises for what a user gave it."""


class ConfigError(SeqParError):
    """A setting that does not exist, does not fit the others, or does not fit the machine or the model."""


class InputError(SeqParError):
    """A tensor or batch that sequence parallel attention cannot take as it is."""


class PlanError(SeqParError):
    """A plan that would compute a wrong result or hang; names rank and step and carries the plan's table."""


class KernelError(SeqParError):
    """No attention kernel can take these blocks; carries every kernel's reasons."""


class DisagreementError(SeqParError):
    """Ranks were given different values of what must be equal, or one of them cannot go on. All ranks raise it."""


class CommunicationError(SeqParError, RuntimeError):
    """Ranks could not communicate, since one ended or did not come. If a plan was running, the message has the step and
    the plan's table."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'zigzag'?)`, or nothing where no known word is near."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{match[0]}'?)" if match else ""


def quoted_list(names: Iterable[str], last: str = "or") -> str:
    """`"a"`, `"a" or "b"`, `"a", "b" or "c"`."""
    *most, end = (f'"{name}"' for name in names)
    return f"{', '.join(most)} {last} {end}" if most else end


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`; many scattered ones are cut short."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:MOST_SHOWN])
    omitted = sum(len(run) for run in runs[MOST_SHOWN:])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {omitted} more" if omitted else "")


def check_choice(kind: str, word: str, known: Iterable[str]) -> None:
    """Raises ConfigError unless `word` is one of `known`; the message names the nearest right word."""
    known = sorted(known)
    if word not in known:
        raise ConfigError(f"{kind} must be one of {', '.join(known)}; got {word!r}{did_you_mean(str(word), known)}")


def as_seqpar_error(what: str, reason: Exception) -> SeqParError:
    """An exception as a SeqParError, which ranks can send to one another. what: a clause, such as "loading data
    failed".
    """
    if isinstance(reason, SeqParError):
        return reason
    sentence = re.split(r"[.!?]\s+(?=[A-Z])", " ".join(str(reason).split()))[0]  # the cause has the whole text
    error = InputError(f"{what}, {type(reason).__name__}: {sentence}")
    error.__cause__ = reason
    return error


def whole_number(x: object) -> int | None:
    """x as an int, where it is one, or such a number of NumPy or torch. None for anything else, True and False too."""
    if type(x) is int:
        return x
    try:
        number = operator.index(x)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises the others
        return None
    return None if "bool" in str(getattr(x, "dtype", type(x))) else number
