"""What a rank does with a drawn case, and what all ranks' outcomes together are worth."""

import contextlib
import functools
import traceback

import torch
import torch.distributed as dist

from ds_seqpar import SeqParError, SequenceParallel, SequenceParallelConfig
from tests.dist.ranks import is_one_sentence
from tests.fuzz import judge
from tests.fuzz.tables import CAUSAL, FORMS, SCALES


def run(case):
    """What came of attention."""

    def start():
        sp = SequenceParallel(SequenceParallelConfig.from_dict(case["section"]), heads=case["heads"])
        return sp, sp.data_rank

    return outcome_of(case, start, lambda sp, wrong: attend(sp, {**case["call"], **wrong.get("call", {})}))


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


def attend(sp, call):
    """What is wrong with attention's results for a drawn call."""
    causal, scale = CAUSAL[call["causal"]], SCALES[call["scale"]]
    whole = judge.inputs(call, call["tokens"] * sp.size, sp.data_rank)
    q, k, v, do = judge.laid_out(call, [share(sp, x) for x in whole])
    rank = dist.get_rank() if call["grads_differ"] else 0
    wanted = [call["grad"][(i + rank) % 3] for i in range(3)]
    leaves = [x.detach() for x in FORMS[call["form"]]([q, k, v])] if call["form"] == "good" else [q, k, v]
    for x, grad in zip(leaves, wanted, strict=True):
        x.requires_grad_(grad and x.is_floating_point())
    given = FORMS[call["form"]](leaves)

    def attention(q, k, v):
        return sp.attention(q, k, v, causal, scale, return_lse=call["lse"])

    with mode(call["mode"]):
        if call["checkpoint"] and call["form"] == "good" and torch.is_grad_enabled() and any(wanted):
            out = sp.checkpoint(attention, *given, use_reentrant=call["checkpoint"] == "reentrant")
        else:
            out = attention(*given)
    found = dict(zip(("out", "lse"), out, strict=True)) if call["lse"] else {"out": out}
    if found["out"].requires_grad:
        found["out"].backward(do.to(found["out"].dtype))
        found |= {name: x.grad for name, x in zip(("dq", "dk", "dv"), leaves, strict=True) if x.requires_grad}
    truth = judge.Truth.of(whole, causal, scale, sp.config, bf16=call["mode"] == "autocast")
    faults = truth.faults({name: x.detach() for name, x in found.items()}, lambda x: sp.shard(x, 1))
    if found["out"].dtype != truth.dtypes[0]:
        faults["dtype"] = found["out"].dtype
    return faults


def share(sp, x):
    """This rank's tokens, as many as there are, where the whole cannot be shared too."""
    tokens = x.shape[1] // sp.size
    if tokens and x.shape[1] % sp.multiple == 0:
        return sp.shard(x, 1)
    return x[:, sp.rank * tokens : (sp.rank + 1) * tokens]


def mode(name):
    return {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    }.get(name, contextlib.nullcontext)()


def in_step(sp):
    """Whether a good attention on the same ranks is right."""
    sp = sp or _all()
    call = {
        "batch": 1, "tokens": sp.multiple // sp.size, "heads": sp.config.ulysses, "kv_heads": sp.config.ulysses,
        "head_dim": 4, "dtype": "fp32", "strides": ("dense",) * 4, "causal": "True", "scale": "None", "lse": False,
        "grad": (True,) * 3, "grads_differ": False, "mode": "plain", "values": "normal", "place": (0,) * 5,
        "form": "good", "seed": 5, "checkpoint": None,
    }  # fmt: skip
    if sp.config.kernel in ("cuda_flash", "flash_attn", "flash_attn_3"):
        sp = _all()
    return not attend(sp, call)


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
    return f"refused, {kinds[0]}" if refused else f"right, {case['section'].get('schedule', 'batches')}", None


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
