"""Packs of the samples of a step, in loops of one's own: what the plain loop computes of the same samples."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils.data import DataLoader, IterableDataset

import ds_seqpar
from ds_seqpar import lengths
from ds_seqpar.data.balance import shards_of
from ds_seqpar.data.batches import lengths_of
from hf_integration import share_sequences
from tests.dist.ranks import WRONG, is_one_sentence, make, refusal
from tests.hf.every_type import tiny
from tests.hf.llama import IGNORE, array, gap, norm, small
from tests.hf.llama import weights as engine_weights
from tests.hf.test_log import Lines
from tests.launch import on_engine_ranks, on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
STEPS, SAMPLES = 3, 10
LENGTHS = {"chat": (1, 2, 3, 5, 9, 40), "uniform": (7, 8, 9, 10, 11, 12), "one long": (2, 2, 2, 47)}


def data_of(kind, seed=0):
    """Samples of these lengths, of which some labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(STEPS * SAMPLES - 3):  # the last step has fewer
        length = LENGTHS[kind][number % len(LENGTHS[kind])]
        ids = torch.randint(1, 64, (length,), generator=generator)
        found.append({"input_ids": ids, "labels": ids.where(torch.rand(length, generator=generator) < 0.8, IGNORE)})
    return found


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def collate(samples):
    """Pads on the left to a multiple of 8."""
    longest = -(-max(len(x["input_ids"]) for x in samples) // 8) * 8
    pads = [(longest - len(x["input_ids"]), 0) for x in samples]
    samples = [{**x, "attention_mask": torch.ones_like(x["labels"])} for x in samples]
    return {
        name: torch.stack(
            [pad(x[name], p, value=-100 * (name == "labels")) for x, p in zip(samples, pads, strict=True)]
        )
        for name in samples[0]
    }


def loader_of(kind, as_stream=False):
    data = data_of(kind)
    if as_stream:
        return DataLoader(Stream(data), batch_size=SAMPLES, collate_fn=collate)
    generator = torch.Generator().manual_seed(5)
    return DataLoader(data, batch_size=SAMPLES, shuffle=True, generator=generator, collate_fn=collate)


def made(model_type):
    return (small() if model_type is None else tiny(model_type)).double()


def plain(kind, as_stream=False, model_type=None):
    """(losses, norms, weights) of the loop without packs, on one process."""
    model, losses, norms = made(model_type), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = loader_of(kind, as_stream)
    loader.collate_fn = list
    for samples in loader:
        count = sum(int((x["labels"][1:] != IGNORE).sum()) for x in samples)
        loss = 0.0
        for x in samples:
            logits = model(input_ids=x["input_ids"][None]).logits[0, :-1]
            loss = loss + torch.nn.functional.cross_entropy(
                logits, x["labels"][1:], ignore_index=IGNORE, reduction="sum"
            )
        (loss / count).backward()
        losses.append((loss / count).item())
        norms.append(norm({name: array(p.grad) for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: array(p) for name, p in model.named_parameters()}


def packed(section, kind, as_stream=False, checkpoints=False, model_type=None):
    """The same of the packs, and (micro-batches of each step, Ulysses sizes)."""
    model, losses, norms, counts = made(model_type), [], [], []
    if checkpoints:
        model.gradient_checkpointing_enable()
    sp = share_sequences(model, **section)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for packs in sp.packs(loader_of(kind, as_stream)):
        counts.append(len(packs))
        of_packs = []
        for batch in packs:
            of_packs.append(model(**batch).loss)
            of_packs[-1].backward()
        losses.append(sp.mean_loss(sum(of_packs)))
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        norms.append(norm({name: array(p.grad) for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    sizes = sorted({sp.size // shards.size for shards in sp.sharding.shards_of.values()})
    weights = {name: array(p) for name, p in model.named_parameters()}
    sp.close()
    return losses, norms, weights, counts, sizes


ULYSSES = {"size": 4, "tokens_per_rank": 16}
CASES = {
    2: [
        ({"size": 2, "tokens_per_rank": 24}, "chat", False),
        ({"size": 2, "ulysses": 2, "tokens_per_rank": 24}, "one long", False),
    ],
    4: [
        ({"size": 2, "tokens_per_rank": 24}, "one long", False),
        ({"size": 2, "tokens_per_rank": 40}, "uniform", True),
        (ULYSSES, "chat", False, True),
    ],
    8: [({"size": 8, "tokens_per_rank": 6}, "chat", False), ({"size": 4, "tokens_per_rank": 12}, "one long", False)],
}


def all_packed(cases):
    return [packed(*case) for case in cases]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_packs_train_as_the_plain_loop_does(ranks):
    expected = {case[1:3]: plain(*case[1:3]) for case in CASES[ranks]}
    for found in on_ranks(ranks, all_packed, CASES[ranks], timeout=200):
        for case, (losses, norms, weights, counts, sizes) in zip(CASES[ranks], found, strict=True):
            of_plain = expected[case[1:3]]
            assert losses == pytest.approx(of_plain[0], rel=1e-6), case
            assert norms == pytest.approx(of_plain[1], rel=1e-6), case
            assert gap(weights, of_plain[2]) < 1e-6, case
            assert len(counts) == STEPS, case
            assert case[0] is not ULYSSES or sizes == [1, 4], case


def received(section, kind):
    """(Bytes that this rank receives in the packs of a step, those of the plan, what is logged of the step.)

    In bf16, since of keys in fp32 ranks share the mean too.
    """
    model, lines = small().to(torch.bfloat16), Lines().lines
    sp = share_sequences(model, **section)
    packs, planned = next(iter(sp.packs(loader_of(kind)))), 0
    comms = {id(runtime.comm): runtime.comm for runtime in sp.runtimes.values()}.values()
    before = sum(comm.received_bytes for comm in comms)
    for batch in packs:
        model(**batch).loss.backward()
        documents = lengths_of(batch)
        shards = sp.place(sum(documents), documents).shards
        if shards == shards_of("balanced", documents, shards.size):  # else ranks have whole samples
            planned += sp.step_dealer.costs.received(documents, sp.size // shards.size, sp.rank)
    return sum(comm.received_bytes for comm in comms) - before, planned, lines


@pytest.mark.parametrize("section", [{"size": 2, "tokens_per_rank": 24}, {"size": 4, "tokens_per_rank": 12}])
def test_ranks_receive_the_bytes_of_the_plan_and_log_them(section):
    found = on_ranks(section["size"], received, section, "chat", timeout=120)
    assert all(of_rank == planned for of_rank, planned, _ in found), found
    most = max(of_rank for of_rank, *_ in found)
    assert most > 0
    (line,) = [line for line in found[0][2] if "first step's work" in line]
    assert missing(line, "over 1 groups", f"{most / 2**20:.3g} MiB", "of its 10 documents are cut") == []


def gathering(documents):
    """Gradients of a model whose layers gather keys, on a pack with another Ulysses size than the configured one."""
    model, ids = tiny("gptj").double(), torch.arange(3, 3 + sum(documents))[None]
    positions, labels = torch.cat([torch.arange(n) for n in documents])[None], ids.clone()
    labels[positions == 0] = IGNORE
    if dist.is_initialized():
        sp = share_sequences(model, size=2, ulysses=2)
        sp.sharding.ulysses_sizes, sp.runtimes[2] = [1, 2], lengths._runtime(sp, 1)
        sp.sharding.shards_of[documents] = shards_of("balanced", documents, 2)
        model(input_ids=ids, labels=labels, position_ids=positions).loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        return {name: array(p.grad) for name, p in model.named_parameters()}
    for row, of_row in zip(ids.split(documents, 1), labels.split(documents, 1), strict=True):
        logits = model(input_ids=row).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, of_row[0, 1:], reduction="sum")
        (loss / (sum(documents) - len(documents))).backward()
    return {name: array(p.grad) for name, p in model.named_parameters()}


def test_layers_that_gather_keys_train_with_the_ulysses_size_of_a_pack():
    expected = gathering((9, 4, 7))
    for found in on_ranks(2, gathering, (9, 4, 7), timeout=120):
        assert gap(found, expected) < 1e-6  # its attention casts to fp32


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_models_whose_configs_have_other_names_train_in_packs(model_type):
    expected = plain("chat", model_type=model_type)
    for found in on_ranks(2, packed, {"size": 2, "tokens_per_rank": 24}, "chat", False, False, model_type, timeout=120):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert gap(found[2], expected[2]) < 1e-6


def by_engine(stage, kind):
    """(losses, weights) of a loop with a DeepSpeed engine."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "sequence_parallel": {"size": 2, "tokens_per_rank": 24},
    }
    engine, *_ = ds_seqpar.initialize(model=small(), config=config)
    sp, losses = engine.sequence_parallel, []
    for packs in sp.packs(loader_of(kind)):
        of_packs = []
        for number, batch in enumerate(packs, 1):
            engine.set_gradient_accumulation_boundary(number == len(packs))
            of_packs.append(engine(**batch).loss)
            engine.backward(of_packs[-1])
        engine.step()
        losses.append(sp.mean_loss(sum(of_packs)))
    return losses, engine_weights(engine.module)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_packs_train_by_an_engine(stage):
    losses, _, weights = plain("chat")
    for found in on_engine_ranks(2, by_engine, stage, "chat", timeout=120):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert gap(found[1], weights) < 1e-5


def resumed(section, kind):
    """(ids of the micro-batches of the last two steps, those after a state that was taken before them)."""
    sp = share_sequences(small(), **section)
    steps, state, found = sp.packs(loader_of(kind)), None, []
    for packs in steps:
        found.append([batch["input_ids"].tolist() for batch in packs])
        state = state or steps.state_dict()
    again = sp.packs(loader_of(kind))
    again.load_state_dict(state)
    return found[1:], [[batch["input_ids"].tolist() for batch in packs] for packs in again]


def test_packs_go_on_in_the_middle_of_an_epoch():
    for expected, found in on_ranks(2, resumed, {"size": 2, "tokens_per_rank": 24}, "chat", timeout=120):
        assert len(found) == 2
        assert found == expected


def first_step(loader, of_config=None, **section):
    def call():
        model = small()
        vars(model.config).update(of_config or {})
        sp = share_sequences(model, **{"size": 2, "tokens_per_rank": 24, **section})
        return next(iter(sp.packs(loader(sp))))

    return call


def sharded():
    sp = share_sequences(small(), size=2, tokens_per_rank=24)
    sp.shard_batches([collate(data_of("chat")[:2])])


def without_a_model():
    make(size=2, tokens_per_rank=24).packs(loader_of("chat"))


def two_rows(samples):
    return collate(samples * 2)


def other_on_one_rank(sp):
    data = data_of("chat", seed=int(sp.rank == WRONG))
    return DataLoader(data, batch_size=SAMPLES, collate_fn=collate)


def all_steps(data_of_rank, tokens_per_rank=24):
    """Goes through a stream of the samples that a function of (whether this rank is the wrong one) gives."""

    def call():
        sp = share_sequences(small(), size=2, tokens_per_rank=tokens_per_rank)
        stream = Stream(data_of_rank(sp.rank == WRONG and sp.data_rank == 0))
        list(sp.packs(DataLoader(stream, batch_size=SAMPLES, collate_fn=collate)))

    return call


def without_labels(samples):
    return {name: x for name, x in collate(samples).items() if name != "labels"}


def without_tokens(samples):
    batch = collate(samples)
    return {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}


def failing(is_wrong):
    yield from data_of("chat")[:SAMPLES]
    if is_wrong:
        raise OSError("this file is gone")
    yield from data_of("chat")[SAMPLES:]


def refusals():
    cases = {
        "too long": first_step(lambda sp: loader_of("one long"), tokens_per_rank=23),
        "too long in a stream": all_steps(lambda is_wrong: data_of("one long"), 23),
        "too long on one rank": all_steps(lambda is_wrong: data_of("one long" if is_wrong else "uniform"), 23),
        "no labels": first_step(lambda sp: DataLoader(data_of("chat"), batch_size=2, collate_fn=without_labels)),
        "no tokens": first_step(lambda sp: DataLoader(data_of("chat"), batch_size=2, collate_fn=without_tokens)),
        "no words": first_step(lambda sp: DataLoader(["a text"] * 4, batch_size=2)),
        "other stream": all_steps(lambda is_wrong: data_of("chat", seed=int(is_wrong))),
        "shorter stream": all_steps(lambda is_wrong: data_of("chat")[: SAMPLES if is_wrong else None]),
        "failing stream": all_steps(failing),
        "not set": first_step(lambda sp: loader_of("chat"), tokens_per_rank="auto"),
        "one rank": first_step(lambda sp: loader_of("chat"), size=1),
        "other data": first_step(other_on_one_rank),
        "two rows": first_step(lambda sp: DataLoader(data_of("chat"), batch_size=2, collate_fn=two_rows)),
        "no batches": first_step(lambda sp: DataLoader(data_of("chat"), batch_size=None)),
        "dealt": first_step(
            lambda sp: DataLoader(data_of("chat"), sampler=sp.sampler(data_of("chat")), batch_size=2), size=2
        ),
        "experts": first_step(lambda sp: loader_of("chat"), {"output_router_logits": True}),
        "sharded": sharded,
        "no model": without_a_model,
    }
    return {name: refusal(call) for name, call in cases.items()}


EXPECTED = {
    "too long": ("46 tokens", "got 47", "cut it to 46"),
    "too long in a stream": ("46 tokens", "got 47", "cut it to 46"),
    "too long on one rank": ("46 tokens", "got 47", "cut it to 46"),
    "no labels": ("a batch needs labels",),
    "no tokens": ("one token or more",),
    "no words": ("a batch must be a mapping",),
    "other stream": ("samples of a step",),
    "shorter stream": ("batches",),
    "failing stream": ("this file is gone",),
    "not set": ("tokens_per_rank",),
    "one rank": ("2 ranks or more",),
    "other data": ("samples of a step",),
    "two rows": ("got 2 rows",),
    "no batches": ("DataLoader of torch that makes batches",),
    "dealt": ("by its sampler",),
    "experts": ("output_router_logits",),
    "sharded": ("those of sp.packs",),
    "no model": ("got none",),
}


def test_what_cannot_be_packed_is_refused_on_every_rank():
    for found in on_ranks(4, refusals, timeout=200):
        for name, words in EXPECTED.items():
            kind, sentence = found[name]
            assert missing(sentence, *words) == [], (name, kind, sentence)
            assert is_one_sentence(sentence), (name, sentence)
