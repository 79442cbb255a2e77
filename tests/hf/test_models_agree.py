"""Ranks of one sequence compare their models once, before the first sharded forward communicates."""

import functools

import pytest
import torch
import torch.distributed as dist
from transformers import get_linear_schedule_with_warmup

import ds_seqpar
from hf_integration import patch_attention
from hf_integration.model.weights import fingerprint
from tests.dist.ranks import WRONG, is_one_sentence, lacking, make, refusal
from tests.hf.conformance import Case, assert_cases
from tests.hf.llama import MODES, llama, one_process, ragged, settings, small, step
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 2
SECTION = MODES["r2"]


def other_rope():
    return small(rope_parameters={"rope_type": "default", "rope_theta": 5e5})


def one_frozen():
    model = small()
    model.lm_head.requires_grad_(False)
    return model


def another_head():
    """Only what the base model does not hold differs."""
    model = small()
    with torch.no_grad():
        model.lm_head.weight += 1
    return model


def another_buffer():
    model = small()
    model.model.rotary_emb.inv_freq *= 2
    return model


# what the wrong rank has -> words of the sentence
OTHERS = {
    "dtype": (lambda: small().double(), "float64"),
    "layers": (llama, "layers"),
    "width of the mlp": (lambda: small(intermediate_size=128), "(128, 64)"),
    "weights": (lambda: small(seed=5), "call torch.manual_seed with one seed"),
    "head": (another_head, "values of lm_head.weight"),
    "rope": (other_rope, "500000.0"),
    "buffer": (another_buffer, "values of model.rotary_emb.inv_freq"),
    "frozen": (one_frozen, "trained parameters"),
}  # fmt: skip

# what one token of a batch is -> a word of the sentence: one rank alone would meet it, and leave its peers waiting
TOKENS = {
    "token above the vocabulary": ("input_ids", 64, "from 0 to 63"),
    "token below 0": ("input_ids", -1, "got -1 at token 5 of row 0"),
    "label above the vocabulary": ("labels", 64, "from 0 to 63"),
}


@on_each_of(WORLD)
def test_a_model_that_is_not_its_peers():
    """Other dtypes aborted, other layers hung, other weights trained on a wrong loss. The sentence names what differs
    alone. So it is of tokens that the model does not have. Then the loss of models that are alike."""
    sp = make(**SECTION)
    for name, (other, word) in OTHERS.items():
        model = patch_attention(other() if sp.rank == WRONG else small(), sp)
        kind, message = refusal(model, **sp.shard_batches(ragged(SECTION, 1, 1))[0])
        assert (kind, word in message, "\n" in message) == ("DisagreementError", True, False), (name, message)
        if name in ("head", "rope", "frozen"):
            assert is_one_sentence(message)
            assert "layers" not in message, message
    for name, (key, value, word) in TOKENS.items():
        (window,) = ragged(SECTION, 1, 1)
        window[key][0, 5] = value
        kind, message = refusal(sp.shard_batches, [window])
        assert (kind, word in message, "\n" in message) == ("InputError", True, False), (name, message)
    assert sum(sp.comm.received.values()) == 0
    model = patch_attention(small(), sp)
    loss = sp.mean_loss([model(**batch).loss for batch in sp.shard_batches(ragged(SECTION, 1, 2))])
    assert loss == pytest.approx(one_process(small(), ragged(SECTION, 1, 2))[1], rel=1e-5)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65_792, torch.float32), (2_048, torch.bfloat16)])
@on_each_of(2)
def test_a_wide_embedding(vocabulary, dtype):
    """Indices of sampled weights were floats: those of more than 2^24 numbers, or 2^8 in bf16, were out of bounds."""
    torch.set_default_dtype(dtype)
    try:
        wide = functools.partial(small, vocab_size=vocabulary, tie_word_embeddings=True, hidden_size=256)
        (batch,) = ragged(SECTION, 1, 1, sequences=2)
        assert_cases({"wide": Case(lambda: wide().float(), {}, lambda number: batch, ["its loss"])})
        model = wide()
        before = fingerprint(model)
        with torch.no_grad():
            model.lm_head.weight.view(-1)[-1] += 1
        changed = [name for name, value in fingerprint(model).items() if value != before[name]]
        assert changed == ["values of model.embed_tokens.weight"]
    finally:
        torch.set_default_dtype(torch.float32)  # other tests run in these processes


@on_each_of(2, keep="deepspeed")
def test_one_ranks_wrong_model_is_told_to_all():
    """Before any group is made: the others used to wait in the constructor of groups that one rank never came to."""
    wrong = dist.get_rank() == 1
    model = torch.nn.Linear(2, 2) if wrong else small()
    told = refusal(ds_seqpar.initialize, model=model, config=settings({"size": 2}, "2", 1, 2))
    kind, *words = ("ConfigError", "sequence_parallel=sp") if wrong else ("DisagreementError", "rank 1 cannot")
    assert lacking(told, kind, "got Linear alone", *words) == []


# --- what ranks train by, which must be the same before any group is used


def json(**changes):
    return settings(SECTION, "2", 1, 2, **changes)


def bucket(size):
    return {"zero_optimization": {"stage": 2, "reduce_bucket_size": size}}


def client(model, rank, of=None, **options):
    """initialize's arguments with an optimizer of one's own, and a scheduler of it where `of` makes one."""
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})
    config = {name: x for name, x in json().items() if name != "optimizer"}
    return {"config": config, "optimizer": optimizer, **({"lr_scheduler": of(optimizer)} if of else {})}


def frozen(model, rank):
    model.lm_head.requires_grad_(rank != WRONG)
    return {"config": json()}


# what differs -> (initialize's arguments by model and rank, words of the sentence)
UNLIKE = {
    "lr": (
        lambda model, rank: {"config": json(optimizer={"type": "SGD", "params": {"lr": 0.1 * (1 + rank)}})},
        ("DeepSpeed JSON", "rank 0: optimizer_params lr 0.1", "rank 1: optimizer_params lr 0.2"),
    ),
    "clipping": (
        lambda model, rank: {"config": json(gradient_clipping=float(rank))},
        ("gradient_clipping 0.0", "gradient_clipping 1.0"),
    ),
    "ZeRO stage": (
        lambda model, rank: {"config": json(zero_optimization={"stage": 1 + rank})},
        ("zero_optimization stage 1", "zero_optimization stage 2"),
    ),
    "buckets": (
        lambda model, rank: {"config": json(**bucket(1000 + rank))},
        ("zero_optimization reduce_bucket_size 1000", "reduce_bucket_size 1001"),
    ),
    "accumulation": (
        lambda model, rank: {"config": settings(SECTION, "2", 1 + rank, 2)},
        ("gradient_accumulation_steps 1", "gradient_accumulation_steps 2"),
    ),
    "precision": (lambda model, rank: {"config": json(bf16={"enabled": rank == WRONG})}, ("bf16 enabled True",)),
    "client's lr": (
        lambda model, rank: client(model, rank, lr=0.1 * (1 + rank)),
        ("arguments", "rank 0: optimizer groups [0] lr 0.1", "rank 1: optimizer groups [0] lr 0.2"),
    ),
    "client's weight decay": (
        lambda model, rank: client(model, rank, weight_decay=0.5 * rank),
        ("optimizer groups [0] weight_decay 0", "optimizer groups [0] weight_decay 0.5"),
    ),
    "order of parameters": (
        lambda model, rank: {"config": json(), "model_parameters": iter([*model.parameters()][:: 1 - 2 * rank])},
        ("model_parameters [0] 'model.embed_tokens.weight", "model_parameters [0] 'lm_head.weight"),
    ),
    "scheduler": (
        lambda model, rank: client(model, rank, lambda its: torch.optim.lr_scheduler.StepLR(its, 1 + rank)),
        ("lr_scheduler step_size 1", "lr_scheduler step_size 2"),
    ),
    "warmup": (
        lambda model, rank: client(model, rank, lambda its: get_linear_schedule_with_warmup(its, rank, 9)),
        ("num_warmup_steps 0", "num_warmup_steps 1"),
    ),
    "a function of one's own": (
        lambda model, rank: {"config": json(), "lr_scheduler": lambda its, factor=rank: its},
        ("lr_scheduler [1] 0", "lr_scheduler [1] 1"),
    ),
    "frozen": (frozen, ("lm_head.weight", "frozen'")),
    "check_loss": (lambda model, rank: {"config": json(), "check_loss": rank != WRONG}, ("check_loss False",)),
    "with the doctor": (
        lambda model, rank: {"config": json(**bucket(1000 + rank)), "doctor": True},
        ("reduce_bucket_size 1000", "reduce_bucket_size 1001"),
    ),
}
# what one rank is refused, before it meets the others -> its configuration
REFUSED = {
    "no file": ("nowhere.json", "nowhere.json"),
    "auto": (json(gradient_clipping="auto"), "gradient_clipping"),
    "groups of DeepSpeed": (json(sequence_parallel_size=2), "sequence_parallel_size"),
}


@on_each_of(WORLD, keep="deepspeed")
def test_ranks_that_would_train_by_other_settings_are_told_before_they_do(tmp_path):
    """Other rates, clipping and stages trained without a word; other buckets and accumulation aborted the process. What
    a rank keeps for itself may differ."""
    rank = dist.get_rank()
    for name, (given, words) in UNLIKE.items():
        model = small()
        told = refusal(ds_seqpar.initialize, model=model, **given(model, rank))
        assert lacking(told, "DisagreementError", "all ranks must be given the same", *words) == [], name
    for name, (config, word) in REFUSED.items():
        told = refusal(ds_seqpar.initialize, model=small(), config=config if rank == WRONG else json())
        assert lacking(told, "ConfigError" if rank == WRONG else "DisagreementError", word) == [], (name, told)
    own = {
        "steps_per_print": 1 + rank, "wall_clock_breakdown": rank == 0, "memory_breakdown": rank == 0,
        "csv_monitor": {"enabled": rank == 0, "output_path": f"{tmp_path}/{rank}"}, "run_name": f"{rank}",
        "flops_profiler": {"enabled": rank == WRONG, "output_file": f"{tmp_path}/{rank}.txt"},
    }  # fmt: skip
    engine, *_ = ds_seqpar.initialize(model=small(), config=json(**own))
    loss = step(engine, engine.sequence_parallel.shard_batches(ragged(SECTION, 1, 1)))["loss"]
    assert loss == pytest.approx(one_process(small(), ragged(SECTION, 1, 1))[1], rel=1e-5)
