import time
import copy
import deepspeed
import torch
import ds_seqpar
from tests.hf.llama import *
from tests.launch import on_ranks

RATE = 2.0**20
STAGES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3rs": {"stage": 3, "reduce_scatter": False},
}

def settings(section, stage, steps, micro, **changes):
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": STAGES[stage],
        "steps_per_print": 2**30,
        "sequence_parallel": section,
        **changes,
    }

def weights(model):
    found = {}
    for n, p in model.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            found[n] = array(p)
    return found

def train(cases):
    out = []
    for stage, section, steps in cases:
        t = time.time()
        data = 4 // section["size"]
        model = llama()
        before = weights(model)
        engine, *_ = ds_seqpar.initialize(model=model, config=settings(section, stage, steps, 4 // data))
        sp = engine.sequence_parallel
        window = [part(b, sp.data_rank, data) for b in ragged(section, data, steps)]
        losses = []
        for batch in sp.shard_batches(window):
            loss = engine(**batch).loss
            engine.backward(loss)
            losses.append(loss)
            engine.step()
        after = weights(model)
        out.append(({n: (before[n] - after[n]) / RATE for n in before}, sp.mean_loss(losses), engine.get_global_grad_norm(), time.time() - t))
    return out

def test_x():
    cases = [(s, MODES[m] | {"layout": "zigzag"}, a) for s in STAGES for m in MODES for a in (1, 3)]
    t = time.time()
    results = on_ranks(4, train, cases)
    print(time.time() - t)
    for i, (stage, section, steps) in enumerate(cases):
        data = 4 // section["size"]
        g, l = one_process(llama(), ragged(section, data, steps))
        print(stage, section, steps, [gap(r[i][0], g) for r in results], results[0][i][1] - l, results[0][i][2], norm(g), results[0][i][3])
