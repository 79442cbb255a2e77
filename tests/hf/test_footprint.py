"""The memory that is predicted for a training step is what its tensors take."""

import copy
import dataclasses
import gc

import deepspeed
import pytest
import torch
from torch.nn import functional as F

import ds_seqpar
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.deepspeed.config import DeepSpeedJson, Zero
from ds_seqpar.planner import footprint as planner
from ds_seqpar.planner.footprint import footprint
from ds_seqpar.planner.request import TRAINERS, Objective, TrainingStep
from hf_integration import patch_attention
from hf_integration.look.sizes import config_sizes, model_sizes
from tests import live
from tests.hf.llama import llama, with_lora
from tests.launch import on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
SEQ = 1024
WORDS = 64
SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_key_value_heads": 4}
RING, MESH = {"ulysses": 1, "schedule": "ring"}, {"ulysses": 1, "schedule": "attention2d", "rows": 2}
TILES = {"mlp_tiles": 8, "loss_tiles": 8}
OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
AWAY = {**OPTIMIZER, "offload_param": {"device": "cpu"}}
# of torch's own copies of a tile, which is as wide as the vocabulary here
DPO = dataclasses.replace(TRAINERS["dpo"], triton=False)
# ranks, settings, stage, checkpointing, what ZeRO offloads, and what is trained
CASES = {
    "loss of two": (2, {"ulysses": 2}, 3, True, {}),
    "attention of two": (2, {**RING, "head_chunks": 2, **TILES}, 3, True, {}),
    "offloaded": (2, {**RING, **TILES}, 3, True, AWAY),
    "pairs, offloaded, of two": (2, {**RING, **TILES}, 3, True, AWAY, DPO),
    "pairs": (2, {"ulysses": 2}, 3, True, {}, DPO),
    "pairs and tiles": (2, {**RING, **TILES}, 2, False, {}, DPO),
    "pairs and adapters": (2, {"ulysses": 2}, 3, True, {}, dataclasses.replace(DPO, reference=False)),
    "shared prompts": (4, RING, 3, True, {}, dataclasses.replace(DPO, completions=2, completion=SEQ // 4)),
    "loss": (4, {"ulysses": 4}, 3, True, {}),
    "attention": (4, {"ulysses": 2, "schedule": "ring", "head_chunks": 2, **TILES}, 3, True, {}),
    "mesh": (4, {**MESH, **TILES}, 3, True, {}),
    "again": (4, {**RING, **TILES, "recompute_attention": True}, 2, True, {}),
    "saved": (4, {**RING, **TILES}, 1, False, {}),
    "offloaded at stage 1": (4, {**RING, **TILES}, 1, True, OPTIMIZER),
    "offloaded at stage 2": (4, {**RING, **TILES}, 2, True, OPTIMIZER),
}


class Within(live.Live):
    inside = ("ds_seqpar", "deepspeed")


def tensors():
    gc.collect()
    return [x for x in gc.get_objects() if type.__instancecheck__(torch.Tensor, x) and x.device.type == "cpu"]


def resting():
    """Bytes of the storages of all tensors."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors()}.values())


def pair(objective):
    """Ids and labels of two rows, which may share a prompt."""
    ids = torch.randint(0, SHAPE["vocab_size"], (2, SEQ), generator=torch.Generator().manual_seed(0))
    labels, prompt = ids.clone(), SEQ - objective.completion if objective.completions > 1 else 0
    ids[1, :prompt] = ids[0, :prompt]
    labels[:, :prompt] = -100
    return ids, labels


def pair_loss(engine, config, objective, ids, labels):
    """The loss of a pair, against the model without its adapters or another one."""
    from trl.trainer import utils

    utils._CHUNKED_LOGPROB_CHUNK_SIZE = WORDS
    planner.TILE = (4096, WORDS)
    sp = engine.sequence_parallel
    adapted = engine.module if hasattr(engine.module, "get_base_model") else None
    utils.add_fused_lm_head(
        adapted.get_base_model() if adapted else engine.module,
        outputs=("log_probs", "entropy", "mean_logits", "is_top1"),
    )
    reference = engine
    if objective.reference:
        model = patch_attention(llama(seed=1, **SHAPE), sp)
        utils.add_fused_lm_head(model)
        given = copy.deepcopy(config)
        del given["optimizer"], given["sequence_parallel"]
        given["zero_optimization"].pop("offload_optimizer", None)
        given["zero_optimization"]["stage"] = 3 if given["zero_optimization"]["stage"] == 3 else 0
        reference, *_ = deepspeed.initialize(model=model, config=given)

    def loss():
        numbers = engine(input_ids=ids, labels=labels, fused_lm_head=True).log_probs.sum(1)
        with torch.no_grad():
            other = reference(input_ids=ids, labels=labels, fused_lm_head=True).log_probs.sum(1)
        margin = (numbers - other)[0] - (numbers - other)[1]
        return -F.logsigmoid(0.1 * margin)

    return loss


def measured(world, section, stage, checkpointing, away, objective=None):
    """(bytes between steps, at the most in a step), as they are and as they are said."""
    rows = pair(objective or DPO)
    before = resting()
    model = llama(**SHAPE)
    if objective and not objective.reference:
        model = with_lora(model, "q_proj", "v_proj")
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
    loss = objective and pair_loss(engine, config, objective, *rows)

    def step():
        if loss:
            engine.backward(loss())
        else:
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
    if objective and not objective.reference:
        trained = sum(getattr(x, "ds_numel", x.numel()) for x in model.parameters() if x.requires_grad)
        numbered = dataclasses.replace(numbered, trained=trained, parameters=numbered.parameters + trained)
    objective = objective or Objective()
    said = footprint(
        TrainingStep(
            model=numbered, config=sp.config, world=world, seq=objective.sequence(SEQ), dtype="float32",
            batch=objective.batch(1), zero=json.known.zero_optimization, checkpointing=checkpointing,
            objective=objective,
        )
    )  # fmt: skip
    host = said.host.total - said.host.bytes_by_item.get(
        "rounding", 0
    )  # which is the rank's own memory here, and not pinned
    return (states, states + min(peaks)), (said.resting.total + host, said.peak.total + host)


@pytest.mark.parametrize(
    "name", [name if name.endswith("two") else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_step_takes_what_was_predicted(name):
    found = on_ranks(CASES[name][0], measured, *CASES[name])
    most = [max(sizes) for sizes in zip(*(as_is for as_is, _ in found), strict=True)]
    assert found[0][1] == pytest.approx(most, rel=0.1)


@pytest.mark.parametrize("prompt", [256, 1000])
def test_generating_takes_what_was_predicted(prompt):
    """Of a rank alone, whose rows are half of a group's. The longer prompts' mask takes more than the MLP."""
    model, completion = llama(**SHAPE, max_position_embeddings=SEQ).eval(), 16
    objective = dataclasses.replace(TRAINERS["grpo"], generated=8, completion=completion)
    config = SequenceParallelConfig(size=2, ulysses=1).resolve(2, (8, 4))
    memory = footprint(
        TrainingStep(model=model_sizes(model), config=config, world=2, seq=prompt + completion, dtype="float32",
                     zero=Zero(stage=2), objective=objective)
    )  # fmt: skip
    predicted = max(moment.total - memory.resting.total for moment in memory.moments[:2])
    ids, mask = torch.randint(0, 512, (4, prompt)), torch.ones(4, prompt, dtype=torch.long)
    mask[0, 0] = 0
    with Within(*tensors()) as seen, torch.no_grad():
        model.generate(ids, attention_mask=mask, max_new_tokens=completion, min_new_tokens=completion)
    assert predicted == pytest.approx(seen.peak, rel=0.1)
