"""Ranks of one sequence compare their models once, before the first sharded forward communicates."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import get_linear_schedule_with_warmup

import ds_seqpar
from hf_integration import patch_attention, share_sequences
from hf_integration.model.weights import fingerprint
from tests.dist.ranks import WRONG, is_one_sentence, lacking, make, refusal
from tests.hf.llama import MODES, array, averaged, gap, llama, one_process, ragged, settings, small, step
from tests.launch import on_engine_ranks as on_ranks
from tests.words import missing

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


def forwards():
    """What a forward says where one rank has another model, and of tokens that the model does not have; then the loss
    of models that are alike, twice."""
    sp, found = make(**SECTION), {}
    for name, (other, _) in OTHERS.items():
        model = other() if dist.get_rank() == WRONG else small()
        patch_attention(model, sp)
        (batch,) = sp.shard_batches(ragged(SECTION, 1, 1))
        found[name] = *refusal(model, **batch), sum(sp.comm.received.values())
    model = patch_attention(small(), sp)
    for name, (key, value, _) in TOKENS.items():
        (window,) = ragged(SECTION, 1, 1)
        window[key][0, 5] = value
        found[name] = *refusal(sp.shard_batches, [window]), sum(sp.comm.received.values())
    return found, sp.mean_loss([model(**batch).loss for batch in sp.shard_batches(ragged(SECTION, 1, 2))])


def test_a_model_that_is_not_its_peers():
    """Other dtypes aborted, other layers hung, other weights trained on a wrong loss. The sentence names what differs
    alone."""
    for found, loss in on_ranks(WORLD, forwards):
        for name, (kind, message, received) in found.items():
            expected, word = (
                ("InputError", TOKENS[name][2]) if name in TOKENS else ("DisagreementError", OTHERS[name][1])
            )
            assert kind == expected, (name, message)
            assert word in message, (name, message)
            assert "\n" not in message
            assert received == 0
        for name in ("head", "rope", "frozen"):
            assert is_one_sentence(found[name][1])
            assert "layers" not in found[name][1], found[name][1]
        assert loss == pytest.approx(one_process(small(), ragged(SECTION, 1, 2))[1], rel=1e-5)


def unseeded(stages):
    """Models that every rank made by a seed of its own, and DeepSpeed or DDP makes alike: a step at each stage, and the
    gap of the gradients on DDP from those of rank 0's model."""
    found = []
    for stage in stages:
        model = small(seed=dist.get_rank())
        engine, *_ = ds_seqpar.initialize(model=model, config=settings(SECTION, stage, 1, 4))
        batches = engine.sequence_parallel.shard_batches(ragged(SECTION, 1, 1))
        found.append(step(engine, batches))
    sp = make(**SECTION)
    model = DistributedDataParallel(patch_attention(small(seed=dist.get_rank()), sp))
    (batch,) = sp.shard_batches(ragged(SECTION, 1, 1))
    model(**batch).loss.backward()
    return found, {name: p.grad.numpy() for name, p in model.module.named_parameters()}


def test_models_that_deepspeed_or_ddp_makes_alike_are_taken():
    gradients, loss = one_process(small(), ragged(SECTION, 1, 1))
    for found, on_ddp in on_ranks(WORLD, unseeded, ("0", "1", "2", "3")):
        for result in found:
            assert gap(result["gradients"], gradients) < 1e-5
            assert result["loss"] == pytest.approx(loss, rel=1e-5)
        assert gap(on_ddp, gradients) < 1e-5


def wide(vocabulary, dtype):
    """Of a model with a wide embedding: (the greatest gap of gradients and loss on the plain model's; names of what
    ranks compare that changes with the last number of the embedding)."""
    torch.set_default_dtype(dtype)
    try:
        return compared_wide(vocabulary)
    finally:
        torch.set_default_dtype(torch.float32)  # other tests run in these processes


def compared_wide(vocabulary):
    (batch,) = ragged(SECTION, 1, 1, sequences=2)
    model = small(vocab_size=vocabulary, tie_word_embeddings=True, hidden_size=256).float()
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: array(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    share_sequences(model, size=2)
    mine = model(**batch).loss
    mine.backward()
    error = max(gap(averaged(model), gradients), abs(mine.item() / loss.item() - 1))
    before = fingerprint(model)
    with torch.no_grad():
        model.lm_head.weight.view(-1)[-1] += 1
    return error, [name for name, value in fingerprint(model).items() if value != before[name]]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65_792, torch.float32), (2_048, torch.bfloat16)])
def test_a_wide_embedding(vocabulary, dtype):
    """Indices of sampled weights were floats: those of more than 2^24 numbers, or 2^8 in bf16, were out of bounds."""
    for error, changed in on_ranks(WORLD, wide, vocabulary, dtype):
        assert error < 1e-5
        assert changed == ["values of model.embed_tokens.weight"]


def given_on_one_rank():
    """What ranks are told where one gives `initialize` a model that cannot be trained, before any group is made."""
    wrong = dist.get_rank() == 1
    model = torch.nn.Linear(2, 2) if wrong else small()
    return refusal(ds_seqpar.initialize, model=model, config=settings({"size": 2}, "2", 1, 2))


def test_one_ranks_wrong_model_is_told_to_all():
    """The others used to wait in the constructor of groups that one rank never came to make."""
    (first, told), (second, cause) = on_ranks(2, given_on_one_rank)
    assert (first, second) == ("DisagreementError", "ConfigError")
    assert missing(told, "rank 1 cannot", "got Linear alone") == []
    assert missing(cause, "got Linear alone", "sequence_parallel=sp") == []


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


def unlike(folder):
    """What is said of each, by name; the loss of a step by JSONs that differ in what a rank keeps for itself."""
    rank, found = dist.get_rank(), {}
    for name, (given, _) in UNLIKE.items():
        model = small()
        found[name] = refusal(ds_seqpar.initialize, model=model, **given(model, rank))
    for name, (config, _) in REFUSED.items():
        found[name] = refusal(ds_seqpar.initialize, model=small(), config=config if rank == WRONG else json())
    own = {
        "steps_per_print": 1 + rank, "wall_clock_breakdown": rank == 0, "memory_breakdown": rank == 0,
        "csv_monitor": {"enabled": rank == 0, "output_path": f"{folder}/{rank}"}, "run_name": f"{rank}",
        "flops_profiler": {"enabled": rank == WRONG, "output_file": f"{folder}/{rank}.txt"},
    }  # fmt: skip
    engine, *_ = ds_seqpar.initialize(model=small(), config=json(**own))
    return found, step(engine, engine.sequence_parallel.shard_batches(ragged(SECTION, 1, 1)))["loss"]


def test_ranks_that_would_train_by_other_settings_are_told_before_they_do(tmp_path):
    """Other rates, clipping and stages trained without a word; other buckets and accumulation aborted the process."""
    for rank, (found, loss) in enumerate(on_ranks(WORLD, unlike, tmp_path)):
        for name, (_, words) in UNLIKE.items():
            assert lacking(found[name], "DisagreementError", "all ranks must be given the same", *words) == [], name
        for name, (_, word) in REFUSED.items():
            kind = "ConfigError" if rank == WRONG else "DisagreementError"
            assert lacking(found[name], kind, word) == [], (name, found[name])
        assert loss == pytest.approx(one_process(small(), ragged(SECTION, 1, 1))[1], rel=1e-5)
