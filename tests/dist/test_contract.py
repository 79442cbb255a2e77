"""The gradient contract: what an optimizer step gets on 4 ranks is what one process gets, to the last factor.

Absolute gradients, from SGD without clipping: Adam hides a wrong scale, and so does DeepSpeed's own clipping.
"""

import warnings

import deepspeed
import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import ds_seqpar
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.engine import deepspeed_config
from tests import oracle
from tests.dist.ranks import refusal
from tests.grids import each_then_rest, few_then_rest, grouped
from tests.hf.llama import IGNORE, LAYOUTS, MODES, SEQ, STAGES, array, gap, norm, one_process, part, ragged, small, step
from tests.hf.llama import settings as json_settings
from tests.launch import on_each_of
from tests.launch import on_engine_ranks as on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 4
AXES = {"stage": tuple(STAGES), "mode": tuple(MODES), "layout": LAYOUTS, "steps": (1, 3)}


def legal(case):
    """Layouts differ only where a ring has more than one rank."""
    return case["layout"] == "zigzag" or case["mode"] in ("r2", "r4", "u2r2")


def section(case):
    return {**MODES[case["mode"]], "layout": case.get("layout", "zigzag")}


def settings(case, **changes):
    """The DeepSpeed JSON of a case: 4 sequences a micro-step."""
    groups = case.get("ranks", WORLD) // section(case)["size"]
    return json_settings(section(case), case["stage"], case["steps"], micro=4 // groups, **changes)


def global_window(case):
    """4 sequences a micro-step, so many a group: some rank has no label at all and every group another number. A case
    of fewer ranks than WORLD says so."""
    return ragged(section(case), case.get("ranks", WORLD) // section(case)["size"], case["steps"])


def started(case, model=None, **changes):
    """(engine, its SequenceParallel, this rank's part of the window) of a case."""
    engine, *_ = ds_seqpar.initialize(model=model or small(), config=settings(case, **changes))
    return engine, engine.sequence_parallel, own_window(case, engine.sequence_parallel)


def own_window(case, sp):
    return [part(batch, sp.data_rank, sp.data_size) for batch in global_window(case)]


def train(cases, changes=None, mistake=None):
    """One step a case on this rank. mistake: a function of (sp, batch) that spoils what shard_batches gave."""
    results = []
    for case in cases:
        engine, sp, window = started(case, **changes or {})
        batches = sp.shard_batches(window)
        for batch in batches if mistake else ():
            mistake(sp, batch)
        labels = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in batches)
        results.append({**step(engine, batches), "labels": labels, "data_rank": sp.data_rank})
    return results


def check(result, gradients, loss, stage):
    """The contract, for what one rank found against what one process has."""
    assert all(np.isfinite(g).all() for g in result["gradients"].values())
    assert gap(result["gradients"], gradients) < 1e-5
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    if stage == "0":
        assert result["norm"] is None  # DeepSpeed reports none there
    else:
        assert result["norm"] == pytest.approx(norm(gradients), rel=1e-5)


def by_case(cases, ranks):
    """For each case what all ranks found."""
    return zip(cases, zip(*ranks, strict=True), strict=True)


# each stage once, with a ring in two groups or with Ulysses around one in turn: layouts and modes meet stages by the
# number of ranks only, and tests below have other pairs of them
FEW = [
    {"stage": stage, "mode": mode, "layout": layout, "steps": steps}
    for stage, mode, layout, steps in (
        ("0", "r2", "contiguous", 3), ("1", "u2r2", "striped", 1), ("2", "u2r2", "zigzag", 3),
        ("3", "r2", "striped", 3), ("3", "s1", "zigzag", 1), ("3_all_reduce", "u2r2", "contiguous", 1),
    )
]  # fmt: skip


@pytest.mark.parametrize("cases", grouped(("stage",), legal, FEW, **AXES))
def test_gradients_loss_and_norm_are_those_of_one_process(cases):
    """deepspeed#5248, #6841, transformers#46775: scaled by the wrong world size. verl#2857, 360-LLaMA-Factory#72:
    accumulation gives other losses. Megatron#7513, #673: each rank's own token count. Megatron#1764,
    TransformerEngine#2186: a rank without labels gives NaN."""
    for case, results in by_case(cases, on_ranks(WORLD, train, cases, timeout=400)):
        expected = one_process(small(), global_window(case))
        for result in results:
            check(result, *expected, case["stage"])
        # the window is the hard one it is meant to be
        assert 0 in [result["labels"] for result in results]
        groups = {rank: 0 for rank in range(WORLD // section(case)["size"])}
        for result in results:
            groups[result["data_rank"]] += result["labels"]
        assert len(set(groups.values())) == len(groups)


def test_one_rank_is_one_process():
    """Without ranks to share with, initialize changes nothing."""
    case = {"stage": "2", "mode": "s1", "steps": 3}
    ((result,),) = on_ranks(1, train_alone, case)
    check(result, *one_process(small(), ragged({"size": 4}, 1, 3)), case["stage"])


def train_alone(case):
    engine, sp, _ = started(case, train_micro_batch_size_per_gpu=4, sequence_parallel={"size": "auto"})
    return [step(engine, sp.shard_batches(ragged({"size": 4}, 1, 3)))]


def times_sp(sp, batch):
    """deepspeed#5248, transformers#46775: a factor of the sequence parallel size."""
    batch["num_items_in_batch"] *= sp.size


def without_accumulation(sp, batch):
    """verl#2857, 360-LLaMA-Factory#1: N / world, and engine.backward divides by the steps once more."""
    batch["num_items_in_batch"] *= sp.accumulation_steps


def own_count(sp, batch):
    """Megatron#7513, #673: each rank divides by its own number of labels."""
    batch["num_items_in_batch"] = max(1, int((batch["shift_labels"] != IGNORE).sum()))


def shifted_after_sharding(sp, batch):
    """deepspeed#5419, #7473: labels shifted inside the shard, so that each shard's last ones are wrong."""
    batch["shift_labels"] = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)


MISTAKES = (times_sp, without_accumulation, own_count, shifted_after_sharding)


def train_with_mistakes(case):
    return [train([case], None, mistake)[0] for mistake in (None, *MISTAKES)]


PAIR = {"stage": "2", "mode": "r2", "steps": 3, "ranks": 2}


@pytest.fixture(scope="module", params=each_then_rest([PAIR], [{**PAIR, "mode": "u2r2", "ranks": WORLD}]))
def spoilt(request):
    """(what one process has, what rank 0 finds without a mistake and with each)."""
    case = request.param
    found = on_ranks(case["ranks"], train_with_mistakes, case)[0]
    return one_process(small(), global_window(case)), dict(zip((None, *MISTAKES), found, strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_purpose_is_noticed(spoilt, mistake):
    """The comparison above sees each of the known faults, by its gradients alone."""
    (gradients, loss), found = spoilt
    check(found[None], gradients, loss, "2")
    assert gap(found[mistake]["gradients"], gradients) > 1e-2
    with pytest.raises(AssertionError):
        check(found[mistake], gradients, loss, "2")


def train_clipped(case):
    return [train([case], {"gradient_clipping": 1e-3}, mistake)[0] for mistake in (None, times_sp)]


@pytest.mark.parametrize("size", each_then_rest([2], [4]))
def test_clipping_hides_what_sgd_shows(size):
    """Why the JSON of these tests says gradient_clipping 0: clipped, a factor of sp is gone from the gradients."""
    right, wrong = on_ranks(size, train_clipped, {"stage": "2", "mode": f"r{size}", "steps": 1, "ranks": size})[0]
    assert gap(wrong["gradients"], right["gradients"]) < 1e-3
    assert wrong["norm"] == pytest.approx(right["norm"] / size, rel=1e-5)


@pytest.mark.parametrize("ranks", each_then_rest([2], [WORLD]))
@on_each_of("ranks", keep="deepspeed")
def test_a_window_without_any_label_is_zero_and_not_nan(ranks):
    """Megatron#1764, axolotl#3026: a mean over nothing."""
    for stage in ("0", "2", "3"):
        engine, sp, window = started({"stage": stage, "mode": "r2", "steps": 1, "ranks": ranks})
        for batch in window:
            batch["labels"].fill_(IGNORE)
        result = step(engine, sp.shard_batches(window))
        assert result["loss"] == 0
        assert not any(g.any() for g in result["gradients"].values())


def evaluate_then_train(cases):
    """(evaluation loss of two batches, where training has windows of another length; a training step after it)."""
    results = []
    for case in cases:
        engine, sp, window = started(case)
        engine.eval()
        with torch.no_grad():
            loss = sp.mean_loss([engine(**batch).loss for batch in sp.shard_batches(window[:2], training=False)])
        engine.train()
        results.append((loss, step(engine, sp.shard_batches(window))))
    return results


EVALUATED = [
    {"stage": "0", "mode": "r2", "steps": 3},
    {"stage": "2", "mode": "u4", "steps": 3},
    {"stage": "3", "mode": "u2r2", "steps": 3},
]


@pytest.mark.parametrize("cases", few_then_rest(EVALUATED[2:], EVALUATED[:2]))
def test_evaluation_loss_is_that_of_one_process(cases):
    """transformers#48167: eval_loss cp times too large. axolotl#3026: NaN. Training goes on as if nothing had been."""
    for case, results in by_case(cases, on_ranks(WORLD, evaluate_then_train, cases)):
        _, expected = one_process(small(), global_window(case)[:2])
        for loss, result in results:
            assert loss == pytest.approx(expected, rel=1e-5)
            check(result, *one_process(small(), global_window(case)), case["stage"])


BF16 = {"bf16": {"enabled": True}}
BF16_CASES = [
    {"stage": stage, "mode": mode, "steps": steps}
    for stage in STAGES for mode in ("r4", "u2r2") for steps in (1, 3)
]  # fmt: skip
BF16_FEW = [{"stage": "3", "mode": "u4", "steps": 1}]


@pytest.mark.parametrize("cases", few_then_rest(BF16_FEW, [case for case in BF16_CASES if case not in BF16_FEW]))
def test_bf16_is_as_near_as_one_process_in_bf16(cases):
    """deepspeed PR 4530, 5555: bf16 sums of gradients hurt. Twice the error that one process in bf16 makes against
    fp32 is allowed (both are rounding noise of 1 to 2 %; a wrong scale would be at least 50 % off); loss and norm, in
    which that noise averages out, to a bf16 digit."""
    for case, results in by_case(cases, on_ranks(WORLD, train, cases, BF16, timeout=400)):
        gradients, loss = one_process(small(), global_window(case))
        noise = gap(one_process(small().bfloat16(), global_window(case))[0], gradients)
        for result in results:
            assert gap(result["gradients"], gradients) < 2 * noise < 0.05
            assert result["loss"] == pytest.approx(loss, rel=2**-8)
            assert result["norm"] == pytest.approx(norm(gradients), rel=2**-8)


# what may be set beside the stage without touching the contract
NEUTRAL = {
    "prescale": ("0", {"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
    "fp32_communication": ("1", {"communication_data_type": "fp32"}),
    "overlap": ("2", {"zero_optimization": {"stage": 2, "overlap_comm": True, "round_robin_gradients": True}}),
    "hpz": ("3", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}),
    "predivide": ("1", {"gradient_predivide_factor": 2.0}),
    "all_reduce": ("2", {"zero_optimization": {"stage": 2, "reduce_scatter": False, "contiguous_gradients": False}}),
    "offload": ("2", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    "said_to_be_one_or_switched_off": (
        "2", {"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1},
              "curriculum_learning": {"enabled": False}, "data_efficiency": {"enabled": False},
              "expert_parallel": {"enabled": False}, "hybrid_engine": {"enabled": False}}),
}  # fmt: skip


def train_neutral(names):
    """One step under each of these settings."""
    found = []
    for name in names:
        stage, changes = NEUTRAL[name]
        found += train([{"stage": stage, "mode": "u2r2", "steps": 3}], changes)
    return found


FEW_NEUTRAL = ["predivide", "said_to_be_one_or_switched_off"]


@pytest.mark.parametrize("names", few_then_rest(FEW_NEUTRAL, [name for name in NEUTRAL if name not in FEW_NEUTRAL]))
def test_neutral_settings_are_neutral(names):
    """Settings of DeepSpeed that change how gradients are averaged, and must not change what comes out; and those that
    are refused, switched off."""
    case = {"stage": "2", "mode": "u2r2", "steps": 3}
    expected = one_process(small(), global_window(case))
    for results in on_ranks(WORLD, train_neutral, names, keep=None):
        for name, result in zip(names, results, strict=True):
            check(result, *expected, NEUTRAL[name][0])


def count_sequences(batch_settings, folder):
    """What engines make of batch settings that count sequences; the last one writes down its figures."""
    case, found = {"stage": "2", "mode": "r2", "steps": 1}, []
    config = {key: value for key, value in settings(case).items() if key not in BATCH_KEYS}
    monitored = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}
    monitored |= {"flops_profiler": {"enabled": True, "profile_step": 9}}
    for changes in batch_settings:
        changes = changes if changes is not batch_settings[-1] else {**changes, **monitored}
        engine, *_ = ds_seqpar.initialize(model=small(), config={**config, **changes})
        sp = engine.sequence_parallel
        if changes == SET_LATER:
            _, said = refusal(engine.set_train_batch_size, 9)
            assert missing(said, "a multiple of 2", "got 9") == []
            engine.set_train_micro_batch_size(2)
            assert engine.train_batch_size() == 8
            engine.set_train_batch_size(12)
            engine.tput_timer.batch_size = 12  # which no engine sets again
        result = step(engine, sp.shard_batches(own_window({**case, "steps": 3}, sp)))
        sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
        numbers = *sizes, engine.gradient_accumulation_steps()
        found.append({**result, "numbers": numbers, "expected_window": sp.accumulation_steps})
        assert engine.global_samples == engine.tput_timer.batch_size == 12
    profiled = engine.flops_profiler.ds_engine  # it multiplies these two for the samples of a micro-step
    assert profiled.train_micro_batch_size_per_gpu() * profiled.world_size == 4
    return found


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SET_LATER = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}  # 2 micro-batches
BATCH_SETTINGS = [
    SET_LATER,
    {"train_batch_size": 12, "gradient_accumulation_steps": 3},
]


def test_train_batch_size_counts_sequences(tmp_path):
    """2 groups of 2 ranks, 2 sequences a group, 3 micro-steps: 12 sequences, in DeepSpeed's own figures too, and on its
    monitors' axis. The contract holds with the accumulation that follows."""
    case = {"stage": "2", "mode": "r2", "steps": 3}
    expected = one_process(small(), global_window(case))
    for results in on_ranks(WORLD, count_sequences, BATCH_SETTINGS, tmp_path):
        assert len(results) == len(BATCH_SETTINGS)
        for result in results:
            assert result["numbers"] == (12, 2, 3)
            assert result["expected_window"] == 3
            check(result, *expected, case["stage"])
    written = [path.read_text().splitlines()[-1].split(",")[0] for path in (tmp_path / "job").glob("*.csv")]
    assert set(written) == {"12"}


REFUSED = [
    ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2}, "got 10"),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, "got 24"),
    ({"train_batch_size": 3}, "got 3"),
    ({"train_batch_size": "auto"}, '"auto" for train_batch_size'),
    ({"train_micro_batch_size_per_gpu": 0}, "got 0"),
    ({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1.5}, "got 1.5"),
]


@on_each_of(WORLD, keep="deepspeed")
def test_batch_sizes_that_do_not_fit_are_refused():
    """By both doors, on every rank, with the number that would fit."""
    sp = SequenceParallel(SequenceParallelConfig(size=2))
    for changes, value in REFUSED:
        config = {**changes, "gradient_clipping": 0, "sequence_parallel": {"size": 2}}
        for refused in (
            refusal(deepspeed_config, config, sp),
            refusal(ds_seqpar.initialize, model=small(), config=config),
        ):
            assert refused[0] == "ConfigError", changes
            assert missing(refused[1], value) == []


@on_each_of(WORLD, keep="deepspeed")
def test_a_window_of_another_length_is_refused():
    """360-LLaMA-Factory#1, verl#2857: N of one micro-step and the division by three. Evaluation may differ."""
    _, sp, (batch, *_) = started({"stage": "0", "mode": "r2", "steps": 3})
    for length in (1, 4):
        kind, message = refusal(sp.shard_batches, [batch] * length)
        assert missing(message, "3 micro-batches", f"got {length}") == [], kind
        assert len(sp.shard_batches([batch] * length, training=False)) == length
    assert len(sp.shard_batches([batch] * 3)) == 3


def train_sharded_on_load(folder, cases):
    """A step of a model whose weights from_pretrained shards as it loads them; and whether it did."""
    results = []
    for case in cases:
        sp = SequenceParallel(SequenceParallelConfig(**section(case)), heads=(8, 2))
        loading = HfDeepSpeedConfig(deepspeed_config(settings(case), sp))
        model = LlamaForCausalLM.from_pretrained(folder)
        del loading  # it works for as long as it is there
        sharded = all(p.numel() == 0 and p.ds_numel > 0 for p in model.parameters())
        engine, *_ = ds_seqpar.initialize(model=model, config=settings(case), sequence_parallel=sp)
        results.append({**step(engine, sp.shard_batches(own_window(case, sp))), "sharded": sharded})
    return results


LOADED = {"stage": "3", "mode": "r2", "steps": 3, "ranks": 2}


@pytest.mark.parametrize("case", each_then_rest([LOADED], [{**LOADED, "mode": "u2r2", "ranks": 4}]))
def test_a_model_that_is_sharded_on_load(case, tmp_path):
    """deepspeed#7458: not sharded on load. With train_batch_size, which loading reads too."""
    small().save_pretrained(tmp_path)
    expected = one_process(small(), global_window(case))
    for results in on_ranks(case["ranks"], train_sharded_on_load, tmp_path, [case], keep=None):
        for result in results:
            assert result["sharded"]
            check(result, *expected, case["stage"])


class ScheduleOptions(nn.Module):
    """A user's model: one attention of its own over sp.attention, and a loss that divides its local sum."""

    def __init__(self, sp):
        super().__init__()
        torch.manual_seed(3)
        self.sp = sp
        self.tokens, self.places = nn.Embedding(64, 64), nn.Embedding(SEQ, 64)
        self.q, self.kv, self.out = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 64)
        self.head = nn.Linear(64, 64)

    def forward(self, input_ids, position_ids, shift_labels, num_items_in_batch, **_):
        x = self.tokens(input_ids) + self.places(position_ids)
        q = self.q(x).unflatten(2, (8, 8))
        k, v = self.kv(x).unflatten(2, (4, 8)).chunk(2, dim=2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        loss = nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), shift_labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return loss / num_items_in_batch

    def attention(self, q, k, v):
        if self.sp is not None:
            return self.sp.attention(q, k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def train_own(cases):
    results = []
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # nothing to warn of
            deepspeed.init_distributed()
        sp = SequenceParallel(SequenceParallelConfig(**section(case)))
        engine, *_ = ds_seqpar.initialize(model=ScheduleOptions(sp), config=settings(case), sequence_parallel=sp)
        assert engine.sequence_parallel is sp
        results.append(step(engine, sp.shard_batches(own_window(case, sp))))
    return results


def one_process_own(case):
    model, window = ScheduleOptions(None), global_window(case)
    count = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in window)
    loss = sum(
        model(
            batch["input_ids"],
            torch.arange(SEQ),
            nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE),
            count,
        )
        for batch in window
    )
    loss.backward()
    return {name: array(p.grad) for name, p in model.named_parameters()}, loss.item()


@on_each_of(WORLD, keep="deepspeed")
def test_attention_takes_the_dtypes_that_autocast_makes():
    """Under torch.autocast RoPE leaves q and k in fp32 beside a bf16 v; sdpa takes that, in bf16, and so does ours."""
    sp = SequenceParallel(SequenceParallelConfig(size=4, ulysses=2))
    torch.manual_seed(0)
    whole = [torch.randn(1, SEQ, heads, 8, requires_grad=True) for heads in (8, 2, 2)]
    local = [sp.shard(x.detach(), 1).requires_grad_() for x in whole]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (*whole[:2], whole[2].bfloat16())), is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        out = sp.attention(*local[:2], local[2].bfloat16())
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert {x.grad.dtype for x in local} == {torch.float32}
    # two bf16 results, each rounded by up to 2**-8
    oracle.assert_exact([sp.gather(out.detach(), 1)], [plain.detach()], limit=2**-7)


OWN_FEW = [{"stage": "2", "mode": "r4", "steps": 3, "layout": "striped"}]
OWN_REST = [
    {"stage": "0", "mode": "u2r2", "steps": 1},
    {"stage": "3_all_reduce", "mode": "u2", "steps": 1},
    {"stage": "3", "mode": "u2r2", "steps": 3},
]


@pytest.mark.parametrize("cases", few_then_rest(OWN_FEW, OWN_REST))
def test_a_model_of_ones_own_holds_the_contract(cases):
    """Any module that calls sp.attention and divides its local sum by num_items_in_batch."""
    for case, results in by_case(cases, on_ranks(WORLD, train_own, cases, keep=None)):
        expected = one_process_own(case)
        for result in results:
            check(result, *expected, case["stage"])
