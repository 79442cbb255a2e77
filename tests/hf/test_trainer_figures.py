"""What a run says at its end, and what its state holds, are the plain Trainer's too."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

from ds_seqpar.data.batches import lengths_of
from hf_integration import SequenceParallelCallback
from hf_integration.trainer.callback import FlopCounter
from tests.hf.families import FAMILIES, model_of
from tests.hf.llama import llama, small, with_lora
from tests.hf.trainers import case, compare, documents, make, untimed
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")


def sixteen():
    return {"train_dataset": documents(16)}


# how often is logged; steps are left over, or none was ever logged
FEW = {
    "some left": case(logging_steps=2),
    "none": case(logging_strategy="no", max_steps=2),
    "resumed": case(resume_at=2, max_steps=4, logging_steps=3),
}
LOGGING = {
    "every step": case(logging_steps=1),
    **FEW,
    "an epoch": case(parts=sixteen, logging_strategy="epoch", max_steps=-1, num_train_epochs=1),
}


@pytest.mark.parametrize(
    ("cases", "shapes"), [(FEW, [(2, 2)]), pytest.param(LOGGING, [(4, 2), (4, 4)], marks=pytest.mark.slow)], ids=len
)
def test_the_train_loss_at_the_end_is_that_of_all_ranks(cases, shapes, tmp_path):
    """One rank's share of the steps since the last log: 0.0 where the plain Trainer says 5.96. (Plain ranks say their
    own share too: here one plain rank has it all.)"""
    plain = compare(tmp_path, cases, *shapes, max_steps=3)
    if "every step" in plain:
        every, some = (plain[name]["log"][-1]["train_loss"] for name in ("every step", "some left"))
        assert every == pytest.approx(some, rel=1e-5)


# torch's own writer needs it
BOARD = importlib.util.find_spec("tensorboard") is not None


def scalars(folder):
    """The names that TensorBoard has been told of in a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    boards = [EventAccumulator(str(file)) for file in Path(folder).rglob("events.out.tfevents*")]
    for board in boards:
        board.Reload()
    return {name for board in boards for name in board.Tags()["scalars"]}


class Hears(TrainerCallback):
    """What a logging integration is given."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def comparable(history):
    """As transformers compares the states of a resumed run and a whole one."""
    return [{name: x for name, x in entry.items() if name != "train_loss"} for entry in untimed(history)]


def states(folder, size):
    """The states of a whole run and of one that goes on from its middle; those that both saved; what was reported."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    hears = Hears()
    whole = make(f"{folder}/whole", size, {"size": size}, parts={"callbacks": [hears]}, **saving)
    whole.train()
    dist.barrier()
    again = make(f"{folder}/again", size, {"size": size}, **saving)
    again.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2")
    dist.barrier()
    files = [Path(folder) / name / "checkpoint-4" / "trainer_state.json" for name in ("whole", "again")]
    saved = [json.loads(file.read_text()) for file in files]
    return saved, [trainer.state.log_history for trainer in (whole, again)], hears.logs


def test_states_of_a_whole_and_a_resumed_run_are_the_same(tmp_path):
    """Tokens a second and memory are reported with every loss; in the state they would differ between any two runs."""
    for saved, held, logs in on_ranks(2, states, tmp_path, 2):
        assert comparable(saved[0]["log_history"]) == comparable(saved[1]["log_history"])
        assert {**saved[0], "log_history": []} == {**saved[1], "log_history": []}
        assert comparable(held[0]) == comparable(held[1])
        assert len(held[0]) == 5
        steps = [entry for entry in logs if "loss" in entry]
        assert len(steps) == 4
        assert all(entry["tokens_per_second"] > 0 and entry["memory_gib"] > 0.1 for entry in steps)
        assert not [entry for entry in steps if "mfu" in entry]  # a processor's peak is not known
        shape = {"sp_size": 2, "sp_ulysses": 2, "sp_inner": 1, "data_groups": 1}
        assert shape.items() <= steps[0].items()
        assert not set(shape).intersection(steps[1])


IDS = torch.arange(12).view(2, 6)
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        ({"input_ids": IDS, "labels": IDS}, (6, 6)),
        ({"input_ids": IDS.int()}, (6, 6)),
        ({"input_ids": IDS, "labels": None, "attention_mask": PADDED}, (4, 5)),
        ({"input_ids": IDS, "labels": torch.zeros(2), "attention_mask": PADDED.float()}, (4, 5)),
        ({"inputs_embeds": torch.zeros(2, 6, 8), "attention_mask": PADDED.bool()}, (4, 5)),
        ({"input_ids": IDS.int(), "position_ids": torch.arange(6) % 4}, (4, 2, 4, 2)),
    ],
)
def test_lengths_are_those_of_what_is_trained_on(batch, lengths):
    """Labels are no measure: a class's own loss may have any, or none."""
    assert lengths_of(batch) == lengths


LENGTH, PEAK = 40, 1e9


def utilised(folder):
    """What a run of two ranks reports whose devices are said to do PEAK flops/s, and the flops of a document. ZeRO-3
    leaves nothing in the parameters that are counted."""
    hears, examples = Hears(), [{"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)}] * 8
    parts = {"callbacks": [hears], "train_dataset": examples}
    trainer = make(folder, 2, {"size": 2}, 3, parts=parts, max_steps=2, report_to="tensorboard" if BOARD else "none")
    (figures,) = (x for x in trainer.callback_handler.callbacks if isinstance(x, SequenceParallelCallback))
    figures.peak = PEAK
    trainer.train()
    return hears.logs, FlopCounter(trainer.model).of_documents((LENGTH,))


@pytest.mark.filterwarnings("ignore")
def test_utilisation_is_flops_over_the_peak_of_all_ranks(tmp_path):
    """TensorBoard is told of it too."""
    for logs, flops in on_ranks(2, utilised, tmp_path):
        assert flops == FlopCounter(small()).of_documents((LENGTH,))
        steps = [entry for entry in logs if "loss" in entry]
        assert len(steps) == 2
        for entry in steps:
            expected = entry["tokens_per_second"] / LENGTH * flops / (2 * PEAK)
            assert entry["mfu"] == pytest.approx(expected, rel=1e-2)
    if BOARD:
        assert {"train/mfu", "train/tokens_per_second", "train/loss"} <= scalars(tmp_path)


def lora(*targets, **changes):
    return with_lora(llama(attn_implementation="eager"), *targets, **changes)


def partly(*frozen, **changes):
    """A model in which the parameters of these names are frozen."""
    model = llama(attn_implementation="eager", **changes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in frozen))
    return model


def adapters_of_checkpoints():
    """Whose embeddings are given a gradient, as torch's reentrant checkpoints need it."""
    model = lora("q_proj", "v_proj")
    model.enable_input_require_grads()
    return model


def experts(family):
    """Computed one by one: torch does not count grouped products."""
    model = model_of(family)
    model.set_experts_implementation("eager")
    return model


TRAINED = {
    **{family: lambda family=family: model_of(family) for family in FAMILIES},
    **{family: lambda family=family: experts(family) for family in ("gpt_oss", "qwen3_moe")},
    "tied": lambda: partly(tie_word_embeddings=True),
    "frozen embedding": lambda: partly("embed_tokens"),
    "frozen head": lambda: partly("lm_head"),
    "frozen MLPs": lambda: partly("mlp"),
    "LoRA and its head": lambda: lora("q_proj", "up_proj", modules_to_save=["embed_tokens", "lm_head"]),
    "LoRA with checkpoints": adapters_of_checkpoints,
}
# in which no gradient passes below the lowest trained weight, where flops count as if one did
LESS = {
    "frozen lower half": lambda: partly("embed_tokens", "layers.0.", "layers.1.", num_hidden_layers=4),
    "LoRA of attention": lambda: lora("q_proj", "k_proj", "v_proj"),
    "LoRA behind attention": lambda: lora("o_proj", "down_proj"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*TRAINED, *LESS])
def test_flops_are_those_that_torch_counts(name):
    """torch counts every pair of an attention, visible or not."""
    model = {**TRAINED, **LESS}[name]().train()
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.arange(LENGTH)[None], labels=torch.arange(LENGTH)[None]).loss.backward()
    flops = FlopCounter(model)
    # transformers 5.18 makes RoPE's angles by a product of matrices, which torch counts too
    expected = flops.flops_of_token * LENGTH + sum(flops.flops_of_pair) * LENGTH**2
    over = expected / counted.get_total_flops()
    assert 1.04 < over < 1.3 if name in LESS else over == pytest.approx(1, rel=1e-4)


def test_flops_of_attention_are_those_of_visible_pairs():
    flops, pairs = FlopCounter(llama()), LENGTH * (LENGTH + 1) // 2
    assert flops.of_documents((LENGTH, LENGTH)) == 2 * (
        flops.flops_of_token * LENGTH + sum(flops.flops_of_pair) * pairs
    )


def test_flops_of_packed_weights_are_those_of_whole_ones():
    """bitsandbytes keeps two weights in a byte, as one column."""
    whole, packed = (lora("q_proj", "v_proj") for _ in range(2))
    for module in packed.modules():
        if isinstance(module, torch.nn.Linear) and not module.weight.requires_grad:
            halves = torch.zeros(module.weight.numel() // 2, 1, dtype=torch.uint8)
            module.weight = torch.nn.Parameter(halves, requires_grad=False)
    assert FlopCounter(packed).of_documents((LENGTH,)) == FlopCounter(whole).of_documents((LENGTH,))
