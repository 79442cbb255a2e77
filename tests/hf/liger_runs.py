"""What ranks of a launcher do for test_liger.py, in Triton's interpreter: TRITON_INTERPRET=1 torchrun liger_runs.py
FOLDER writes what rank 0 found as FOLDER/RANKS.json."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

from hf_integration import patch_attention
from tests.dist.ranks import make, refusal
from tests.hf import trainers
from tests.hf.families import batch_of, gradients
from tests.hf.llama import averaged, gap, small

STEPS, LENGTH = 2, 12  # a token takes the interpreter some hundredths of a second
# by ranks: (whether with Liger, size, ZeRO's stage, tiles); size None: the plain Trainer
CASES = {
    1: [(False, None, 2, {}), (True, None, 2, {}), (True, 1, 2, {})],
    2: [(True, 2, 2, {}), (True, 2, 3, {"mlp_tiles": 3, "loss_tiles": "auto"})],
}


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)


def converted(given, own=interpreter._implicit_cvt):
    if isinstance(given, float):
        return tl.tensor(interpreter.TensorHandle(np.array([given], np.float32), tl.float32), tl.float32)
    return own(given)


# the interpreter has no functions of a GPU's library, and does not give kernels their floats as scalars of fp32
libdevice.rsqrt, interpreter._implicit_cvt = rsqrt, converted


def logs(folder, liger, size, stage, tiles):
    """What a Trainer logs; its weights, in FOLDER.pt. By SGD without a norm's bound, so weights show gradients."""
    given = {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": STEPS, "gradient_accumulation_steps": 1}
    given |= {"use_liger_kernel": liger, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0}
    given |= {"lr_scheduler_type": "constant"}
    examples = [{name: x[:LENGTH] for name, x in example.items()} for example in trainers.documents(8)]
    parts = {"train_dataset": examples, "eval_dataset": examples[:2]}
    section, model = size and {"size": size, **tiles}, small(pad_token_id=0)
    trainer = trainers.make(folder, 2, section, stage, model, parts, **given)
    run = trainers.trained(trainer)
    for kernel in (model.forward, model.model.norm.forward, model.model.layers[0].mlp.forward):
        assert kernel.__module__.startswith("liger_kernel.") is liger
    weights = trainer.accelerator.get_state_dict(trainer.deepspeed)  # of all ranks under ZeRO-3
    if dist.get_rank() == 0:
        torch.save(weights, f"{folder}.pt")
    return run.logs


def trls(folder, size):
    """What trl's SFTTrainer with Liger's kernels logs."""
    examples = [{name: x[:LENGTH] for name, x in example.items()} for example in trainers.documents(8)]
    parts = {"train_dataset": trainers.rows_of(examples), "eval_dataset": trainers.rows_of(examples[:4])}
    changes = {"use_liger_kernel": True, "max_steps": 1, "gradient_accumulation_steps": 1}
    given = trainers.case("SFT", parts, section={"mlp_tiles": 2}, **changes)
    trainer = trainers.build(folder, given, size)
    trainer.train()
    assert trainer.model.model.norm.forward.__module__.startswith("liger_kernel.")
    return trainers.untimed(trainer.state.log_history)


def with_liger(**changes):
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model = small(**changes).train()
    _apply_liger_kernel_to_instance(model)
    return model


def whole_calls():
    """Gaps of a patched model's loss and gradients, given a whole batch, from those of the plain one with Liger, and
    of the one without; and what is refused."""
    sp, batch = (
        make(size=2),
        {name: x[:1, :19] for name, x in batch_of("odd").items()},
    )
    plain, shared = with_liger(), patch_attention(with_liger(), sp)
    outputs = [model(**batch) for model in (plain, shared)]
    for output in outputs:
        assert output.logits is None  # the loss is fused
        output.loss.backward()
    loss, other = (output.loss.item() for output in outputs)
    tiles = make(size=2, loss_tiles=2)
    refused = [
        refusal(patch_attention, with_liger(), tiles),
        refusal(lambda: shared(**batch, return_token_accuracy=True)),
    ]
    without = small().train()
    without(**batch).loss.backward()
    gaps = [gap(averaged(shared), gradients(model)) for model in (plain, without)]
    return {"loss": abs(other - loss) / loss, "gradients": gaps, "refused": refused}


def main(folder):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks, found = dist.get_world_size(), {}
    found["runs"] = [logs(f"{folder}/{ranks}{i}", *case) for i, case in enumerate(CASES[ranks])]
    found["trl"] = trls(f"{folder}/trl{ranks}", None if ranks == 1 else 2)
    if ranks == 2:
        found["whole"] = whole_calls()
    if dist.get_rank() == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
