"""A LLaMA so small that a step takes milliseconds, batches for it, and what one process makes of them."""

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from ds_seqpar.core.compiler.sharding.layout import multiple
from tests.oracle import positions

IGNORE = -100
SEQ = 48
# what the "sequence_parallel" section says for each way to share a sequence; s1: not at all
MODES = {
    "s1": {"size": 1},
    "u2": {"size": 2, "ulysses": 2},
    "r2": {"size": 2, "ulysses": 1},
    "u4": {"size": 4, "ulysses": 4},
    "r4": {"size": 4, "ulysses": 1},
    "u2r2": {"size": 4, "ulysses": 2},
}
LAYOUTS = ("contiguous", "striped", "zigzag")
# a step this large leaves nothing of the weights: their difference is the gradient with fp32's full precision
RATE = 2.0**20
STAGES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    # DeepSpeed divides by another number in this path as soon as it is given groups (deepspeed#6841)
    "3_all_reduce": {"stage": 3, "reduce_scatter": False},
}


def llama(seed=0, **changes):
    """GQA, 4 query heads a key/value head. The same weights for the same seed, on every rank."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attn_implementation": "sdpa",
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))


def small(seed=0, **changes):
    """With one layer, for what does not depend on there being another: half the time of the two."""
    return llama(seed, num_hidden_layers=1, **changes)


def with_lora(model, *targets, **changes):
    """The model with adapters of peft's, whose weights begin at random."""
    import peft

    torch.manual_seed(1)
    given = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **changes}
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=list(targets), **given))


def checkpointed(model, reentrant=False):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def frozen(model):
    """Backward ends behind the first layer."""
    model.get_input_embeddings().requires_grad_(False)
    model.base_model.layers[0].requires_grad_(False)
    return model


def adam(rate, **more):
    """Entries of a DeepSpeed JSON: AdamW, which nothing is compiled for."""
    return {"optimizer": {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}}, **more}


def held(section, seq=SEQ):
    """The positions that each rank of a sequence holds."""
    size, ulysses, layout = section["size"], section.get("ulysses", 1), section.get("layout", "zigzag")
    assert seq % multiple(layout, size, ulysses) == 0
    return [positions(layout, seq, size, ulysses, rank) for rank in range(size)]


def ragged(section, data_size, steps, sequences=4, seq=SEQ, seed=7):
    """A window of global batches. Label counts differ between sequences, groups, ranks and micro-steps; the last rank
    of the first group has none in any of them."""
    generator = torch.Generator().manual_seed(seed)
    window = []
    for step in range(steps):
        ids = torch.randint(0, 64, (sequences, seq), generator=generator)
        labels = ids.clone()
        for row in range(sequences):
            labels[row, : 3 * row + 5 * step] = IGNORE
            labels[row, torch.randint(0, seq, (row + step,), generator=generator)] = IGNORE
        predicted = torch.tensor([p + 1 for p in held(section, seq)[-1] if p + 1 < seq])
        labels[: sequences // data_size, predicted] = IGNORE
        window.append({"input_ids": ids, "labels": labels})
    return window


def part(batch, data_rank, data_size):
    """The sequences of one data group."""
    return {name: x.chunk(data_size)[data_rank] for name, x in batch.items()}


def one_process(model, window):
    """(gradients by name, loss) of the mean token loss over all batches of the window, as one process has them."""
    total, count = 0.0, 0
    for batch in window:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        count += int((targets != IGNORE).sum())
    loss = total / count
    loss.backward()
    return {name: array(p.grad) for name, p in model.named_parameters()}, loss.item()


def gap(found, expected):
    """The greatest max|a-b| / max|b| over parameters (or other arrays by name); NaN or inf where one holds it.

    A parameter whose own gradient is next to nothing is measured against a thousandth of the greatest of all.
    """
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(np.abs(b).max() for b in expected.values())
    return float(np.max([np.abs(found[n] - b).max() / max(np.abs(b).max(), floor) for n, b in expected.items()]))


def norm(gradients):
    """The 2-norm of all of them together."""
    return float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in gradients.values())))


def array(x):
    """As numpy, in fp32 or wider: what a rank can hand to the test."""
    x = x.detach()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy().copy()


def settings(section, stage, steps, micro, **changes):
    """A DeepSpeed JSON for plain SGD without clipping; `changes` go on top."""
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


def averaged(model):
    """Gradients by name, averaged over all ranks as ZeRO and DDP do: in one message, since many small ones are what
    takes time where ranks share cores."""
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = torch.cat([x.flatten() for x in given.values()])
    dist.all_reduce(whole)
    parts = (whole / dist.get_world_size()).split([x.numel() for x in given.values()])
    return {name: array(part.view_as(x)) for (name, x), part in zip(given.items(), parts, strict=True)}


def weights(model):
    named = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: array(p) for name, p in named.items()}


def update(engine, batches):
    """One optimizer step: (loss, DeepSpeed's gradient norm; it reports none without ZeRO and clipping)."""
    losses = []
    for batch in batches:
        out = engine(**batch)
        losses.append(out if isinstance(out, torch.Tensor) else out.loss)
        engine.backward(losses[-1])
        engine.step()
    reported = engine.get_global_grad_norm()
    return engine.sequence_parallel.mean_loss(losses), None if reported is None else float(reported)


def step(engine, batches):
    """One optimizer step of plain SGD: gradients by name, loss, DeepSpeed's gradient norm."""
    before = weights(engine.module)
    loss, reported = update(engine, batches)
    after = weights(engine.module)
    gradients = {name: (before[name] - after[name]) / RATE for name in before}
    return {"gradients": gradients, "loss": loss, "norm": reported}
