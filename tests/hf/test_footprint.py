"""The memory that is predicted for a training step is what its tensors take."""

import gc

import pytest
import torch

import ds_seqpar
from ds_seqpar.config.deepspeed_json import DeepSpeedJson
from ds_seqpar.planner.footprint import footprint
from ds_seqpar.planner.request import TrainingStep
from hf_integration.trainer.job import config_sizes
from tests import live
from tests.hf.llama import llama
from tests.launch import on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
SEQ = 1024
SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_key_value_heads": 4}
RING, MESH = {"ulysses": 1, "schedule": "ring"}, {"ulysses": 1, "schedule": "attention2d", "rows": 2}
TILES = {"mlp_tiles": 8, "loss_tiles": 8}
OPTIMISER = {"offload_optimizer": {"device": "cpu"}}
AWAY = {**OPTIMISER, "offload_param": {"device": "cpu"}}
# ranks, settings, stage, checkpointing, what ZeRO offloads
CASES = {
    "loss of two": (2, {"ulysses": 2}, 3, True, {}),
    "attention of two": (2, {**RING, "head_chunks": 2, **TILES}, 3, True, {}),
    "offloaded, of two": (2, {**RING, **TILES}, 3, True, AWAY),
    "loss": (4, {"ulysses": 4}, 3, True, {}),
    "attention": (4, {"ulysses": 2, "schedule": "ring", "head_chunks": 2, **TILES}, 3, True, {}),
    "mesh": (4, {**MESH, **TILES}, 3, True, {}),
    "again": (4, {**RING, **TILES, "recompute_attention": True}, 2, True, {}),
    "saved": (4, {**RING, **TILES}, 1, False, {}),
    "offloaded at stage 1": (4, {**RING, **TILES}, 1, True, OPTIMISER),
    "offloaded at stage 2": (4, {**RING, **TILES}, 2, True, OPTIMISER),
}


class Within(live.Live):
    inside = ("ds_seqpar", "deepspeed")


def tensors():
    gc.collect()
    return [x for x in gc.get_objects() if type.__instancecheck__(torch.Tensor, x) and x.device.type == "cpu"]


def resting():
    """Bytes of the storages of all tensors."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors()}.values())


def measured(world, section, stage, checkpointing, away):
    """(bytes between steps, at the most in a step), as they are and as they are said."""
    before = resting()
    model = llama(**SHAPE)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    zero = {
        "stage": stage, "reduce_bucket_size": 2**16, "stage3_prefetch_bucket_size": 2**16,
        "stage3_max_live_parameters": 2**16, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0,
        **away,
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": zero,
        "sequence_parallel": {"size": world, **section},
    }
    engine, *_ = ds_seqpar.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    sp, ids = engine.sequence_parallel, torch.randint(0, 512, (1, SEQ), generator=torch.Generator().manual_seed(0))

    def step():
        (batch,) = sp.shard_batches([{"input_ids": ids, "labels": ids}])
        engine.backward(engine(**batch).loss)
        engine.step()

    step()
    states = resting() - before
    peaks = []
    for _ in range(2):  # gloo may let go of what it has sent late
        with Within(*tensors()) as seen:
            step()
        peaks.append(seen.peak)
    numbered, json = config_sizes(model.config), DeepSpeedJson.read({"zero_optimization": zero})
    said = footprint(
        TrainingStep(
            model=numbered, config=sp.config, world=world, seq=SEQ, dtype="float32", zero=json.known.zero_optimization,
            checkpointing=checkpointing,
        )
    )  # fmt: skip
    host = said.host.total - said.host.bytes_by_item.get(
        "rounding", 0
    )  # which is the rank's own memory here, and not pinned
    return (states, states + min(peaks)), (said.resting.total + host, said.peak.total + host)


@pytest.mark.parametrize(
    "name", [name if name.endswith("two") else pytest.param(name, marks=pytest.mark.whole) for name in CASES]
)
def test_a_step_takes_what_was_predicted(name):
    found = on_ranks(CASES[name][0], measured, *CASES[name])
    most = [max(sizes) for sizes in zip(*(as_is for as_is, _ in found), strict=True)]
    assert found[0][1] == pytest.approx(most, rel=0.1)
