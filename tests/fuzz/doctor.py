"""Drawn jobs that are sound, in which the doctor must find no fault.

python -m tests.fuzz.doctor [CASES] [FIRST SEED] tries some, 100 without a number.
"""

import contextlib
import random
import sys
import time

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import divisors
from ds_seqpar.doctor import Job, examined
from hf_integration import check_patch
from hf_integration.doctor.checks import shape_of
from tests.dist.ranks import refusal
from tests.fuzz.run import Pools
from tests.hf.every_type import tiny
from tests.hf.families import FAMILIES, model_of

# of types that are not tested by themselves: latents, experts, layers with a state or a convolution, learned positions
OTHERS = ("deepseek_v3", "gpt2", "lfm2", "llama4_text", "mixtral", "opt", "phi", "qwen3_next", "starcoder2")
OPTIMIZERS = {
    "AdamW": {"torch_adam": True, "weight_decay": 0.01},
    "Adam": {"torch_adam": True},
    "SGD": {"momentum": 0.9},
}


def case(seed):
    draw = random.Random(seed)
    ranks = draw.choice((1, 2, 2, 4, 4))
    size = draw.choice(divisors(ranks)[-2:])
    ulysses = draw.choice(divisors(size))
    fitting = sorted(name for name, one in SCHEDULES.items() if list(one.shapes(size // ulysses)))
    schedule = draw.choice(fitting)
    shape = draw.choice(list(SCHEDULES[schedule].shapes(size // ulysses)))
    section = {"size": size, "ulysses": ulysses, "schedule": schedule, **shape}
    section["layout"] = draw.choice(("auto", *SCHEDULES[schedule].at(size // ulysses, shape).layouts))
    section |= {"overlap": draw.random() < 0.3, "comm_dtype": draw.choice(("fp32", "fp32", "bf16"))}
    section |= {"loss_tiles": draw.choice((1, 1, "auto", 2)), "agreement": draw.choice(("auto", "always"))}
    stage, optimizer = draw.choice((0, 1, 2, 3)), draw.choice(sorted(OPTIMIZERS))
    content = {
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4, **OPTIMIZERS[optimizer]}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": draw.random() < 0.5},
        "gradient_clipping": draw.choice((0.0, 0.1, 1.0)),
        "gradient_accumulation_steps": draw.choice((1, 2, 4)),
    }
    model = draw.choice((*sorted(FAMILIES), *OTHERS))
    return {"ranks": ranks, "section": section, "content": content, "model": model, "seed": seed}


def run(case):
    """On a rank: (the checks that failed with what they say, "sound" or "not sound")."""
    name = case["model"]
    model = model_of(name, seed=case["seed"]) if name in FAMILIES else tiny(name, case["seed"])
    shape, config = shape_of(model), SequenceParallelConfig.from_dict(case["section"])
    with SequenceParallel(config, heads=shape["heads"]) as sp:
        if refusal(check_patch, model, sp)[0]:  # as layers with a state in a striped layout
            return {}, "not sound"
        findings = examined(Job(sp=sp, model=model, content=case["content"], quick=True, **shape), str)
    failed = {finding.check: finding.detail for finding in findings if finding.status == "fail"}
    return failed, "sound"


def try_one(pools, case):
    """(seconds, whether it was sound, {} or what was found)"""
    began = time.monotonic()
    results, errors = pools.call(case["ranks"], run, case)
    failed, kind = ({rank: error[-1] for rank, error in errors.items()}, "ended") if errors else results[0]
    return time.monotonic() - began, kind, failed


def main(count, first=0):
    """Try so many cases; return how many the doctor refused."""
    wrong = 0
    with contextlib.closing(Pools()) as pools:
        for seed in range(first, first + count):
            drawn = case(seed)
            seconds, kind, failed = try_one(pools, drawn)
            wrong += bool(failed)
            print(f"{seed - first + 1} of {count}: {seconds:.1f} s, {kind}, {wrong} false alarms", flush=True)
            if failed:
                print(drawn, failed, sep="\n", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:] or ["100"]))))
