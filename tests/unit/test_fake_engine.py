"""Steps of DeepSpeed's engine under ZeRO-3 on a device that is not there: forward and backward move no tensor off it,
on it, or look at a value."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tests.fake_cuda import NEEDS_CPU_BUILD, OneDevice, aten
from tests.gpu import TILES
from tests.stand_in import on_stand_in
from tests.unit.test_fake_step import SEQ, batch_of

pytestmark = NEEDS_CPU_BUILD

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
}
KERNEL = aten._flash_attention_forward, aten._flash_attention_backward


def steps(section, keeps):
    """Kernel calls of a step of whole sequences, and of a packed one."""
    import ds_seqpar
    from ds_seqpar.data.batches import _on_device
    from ds_seqpar.runtime.devices import set_device
    from tests.hf.families import model_of

    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        with set_device():
            model = model_of("llama", window=SEQ, num_hidden_layers=1).train()
        torch.set_default_dtype(torch.float32)
        if keeps:
            model.gradient_checkpointing_enable(keeps)
        given = {**CONFIG, "sequence_parallel": {"ulysses": 1, "schedule": "ring", **section}}
        parameters = list(model.parameters())
        engine, *_ = ds_seqpar.initialize(model=model, model_parameters=parameters, config=given, check_loss=False)
        model.base_model._sequence_parallel_patch.agreement.compared = True  # values, in the first forward alone
        found = []
        for packed in (False, True):
            with unset_fake_temporarily():
                batch = engine.sequence_parallel.shard_batch(batch_of(packed))
            batch = _on_device(batch, engine.sequence_parallel.device)
            with OneDevice() as watch:
                engine.backward(engine(**batch).loss)
            engine.step()
            found.append([watch.calls[op.default] for op in KERNEL])
    return found, str(engine.device), str(engine.sequence_parallel.device)


def zero3():
    from tests.stand_in.engine import for_deepspeed

    for_deepspeed()
    return steps({}, None), steps({**TILES, "offload_checkpoints": True}, {"use_reentrant": False})


def test_steps_under_zero3_with_packs_and_checkpoints_in_host_memory():
    """A ring of two places is two calls: a causal one, and one with the other's block; a pack ends with the block."""
    for rank, found in enumerate(on_stand_in((2, 2, zero3))[0]):
        assert found == (([[2, 2], [1, 1]], f"cuda:{rank}", f"cuda:{rank}"),) * 2
