"""What a rank does with a drawn case, and what all ranks' outcomes together are worth."""

import functools
import traceback

import torch.distributed as dist

from ds_seqpar import SeqParError, SequenceParallel
from tests import attention_cases
from tests.dist.ranks import attention_error, is_one_sentence


def run(case):
    """What came of attention."""

    def use(sp, wrong):
        return attention_cases.attend(sp, {**case, **wrong.get("case", {})})

    return outcome_of(case, lambda: attention_cases.start(case), use)


def outcome_of(case, start, use):
    """This rank's outcome as a dict. said: "right", "wrong", "refused" or "bare"; group: with whom it has to agree.

    start() gives the SequenceParallel and the group, use(it, what is wrong here) what is wrong with
    its results.
    """
    wrong = case["wrong"] or {}
    if wrong.get("rank") not in (None, dist.get_rank()):
        wrong = {}
    outcome = {"group": "all"}
    try:
        _try(wrong, outcome, start, use)
    except Exception:
        outcome |= {"said": "bare", "words": traceback.format_exc()}
    return outcome


def _try(wrong, outcome, start, use):
    sp = None
    try:
        sp, outcome["group"] = start()
        before = sp.comm.received.copy()
        faults = use(sp, wrong)
        outcome |= {"said": "wrong" if faults else "right", "words": str(faults)}
    except SeqParError as error:
        sent = sp is not None and sp.comm.received != before
        outcome |= {"said": "refused", "kind": type(error).__name__, "words": str(error), "sent": sent}
        outcome["in step"] = in_step(sp)


def in_step(sp):
    """Whether a good attention on the same ranks is right."""
    sp = sp or _all()
    return attention_error(sp, heads=(16, 4)) < (2**-4 if sp.config.comm_dtype == "bf16" else 1e-10)


@functools.cache
def _all():
    return SequenceParallel()


def verdict(case, results, errors):
    """(what it came to, None or what is wrong with it) of all ranks' outcomes."""
    if errors:
        return "failed", _told({rank: error[2] for rank, error in errors.items()})
    groups = {}
    for rank, outcome in results.items():
        groups.setdefault(outcome["group"], {})[rank] = outcome
    if len(groups) > 1 and "all" in groups:
        return "failed", f"some ranks could not be set up: {results}"
    for ulysses_size in groups.values():
        if fault := _fault(ulysses_size):
            return "failed", fault
    refused = {rank for rank, outcome in results.items() if outcome["said"] == "refused"}
    wrong = case["wrong"] or {"sure": False, "rank": None}
    if wrong["sure"] and not refused >= ({wrong["rank"]} if wrong["rank"] is not None else set(results)):
        return "failed", f"this cannot be right, and was not refused: {results}"
    if not case["wrong"] and refused:
        return "failed", f"nothing is wrong with it, and it was refused: {results}"
    kinds = sorted({results[rank]["kind"] for rank in refused} - {"DisagreementError"}) or ["DisagreementError"]
    return f"refused, {kinds[0]}" if refused else f"right, {case.get('schedule', 'batches')}", None


def _fault(ulysses_size):
    """Of ranks that share a sequence."""
    said = {outcome["said"] for outcome in ulysses_size.values()}
    if len(said) > 1 or not said <= {"right", "refused"}:
        return _told({rank: f"{outcome['said']}: {outcome['words']}" for rank, outcome in ulysses_size.items()})
    if said == {"right"}:
        return None
    for rank, outcome in ulysses_size.items():
        if not is_one_sentence(outcome["words"]):
            return f"rank {rank}: not one sentence: {outcome['words']}"
        if outcome["sent"] or not outcome["in step"]:
            return f"rank {rank}: sent {outcome['sent']}, in step afterwards {outcome['in step']}: {outcome['words']}"
    quotes = {o["words"] for o in ulysses_size.values() if o["kind"] == "DisagreementError"}
    own = {
        f"rank {rank} cannot go on: {o['words']}"
        for rank, o in ulysses_size.items()
        if o["kind"] != "DisagreementError"
    }
    if len(quotes) > 1 or (own and not quotes <= own):
        return f"ranks were told different things: {ulysses_size}"
    return None


def _told(by_rank):
    """Each text once."""
    texts = {}
    for rank, text in by_rank.items():
        texts.setdefault(text, []).append(str(rank))
    return "\n".join(f"ranks {', '.join(ranks)}: {text}" for text, ranks in texts.items())
