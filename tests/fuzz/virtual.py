"""What is done with drawn attention on virtual ranks, up to 16: it is right, or refused in one sentence."""

import traceback

from ds_seqpar import SeqParError, SequenceParallelConfig
from ds_seqpar import testing as virtual
from tests.dist.ranks import is_one_sentence
from tests.fuzz import judge
from tests.fuzz.tables import CAUSAL, FORMS, SCALES


def attend(case):
    """What is wrong with attention's results."""
    wrong = case["wrong"] or {}
    config = SequenceParallelConfig.from_dict(case["section"])
    call = {**case["call"], **wrong.get("call", {})}
    causal, scale = CAUSAL[call["causal"]], SCALES[call["scale"]]
    whole = judge.inputs(call, call["tokens"] * config.size)
    q, k, v, do = judge.laid_out(call, whole)
    found = virtual.attention(
        config, *FORMS[call["form"]]([q, k, v]), do if any(call["grad"]) else None, causal=causal, scale=scale
    )
    names = judge.NAMES[:4] if any(call["grad"]) else judge.NAMES[:1]
    return judge.Truth.of(whole, causal, scale, config).faults({name: getattr(found, name) for name in names})


def try_one(case):
    wrong = case["wrong"] or {"sure": False}
    try:
        if faults := attend(case):
            return "failed", str(faults)
    except SeqParError as error:
        if not is_one_sentence(str(error)):
            return "failed", f"not one sentence: {error}"
        if not case["wrong"]:
            return "failed", f"nothing is wrong with it, and it was refused: {error}"
        return f"refused, {type(error).__name__}", None
    except Exception:
        return "failed", traceback.format_exc()
    if wrong["sure"]:
        return "failed", "this cannot be right, and was not refused"
    return f"right, {case['section']['schedule']}", None
