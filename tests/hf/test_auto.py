"""What "auto" is in a run: planned where that is asked for, for the length that the JSON says or the data has, the same
on all ranks, and as exact as any other shape."""

import contextlib
import io
import json
import os
from pathlib import Path

import datasets
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import ds_seqpar
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.planner.machine import PRESETS
from ds_seqpar.planner.request import Job, Objective
from hf_integration import PackingCollator, Packs, SequenceParallelMixin, job_of
from hf_integration.trainer.job import longest_example
from tests.dist.ranks import is_one_sentence, refusal
from tests.grids import each_then_rest
from tests.hf.families import model_of
from tests.hf.llama import gap, llama, one_process, ragged, settings, small, step
from tests.hf.trainers import (
    build,
    case,
    collate,
    documents,
    fields,
    lora,
    make,
    policy,
    reference,
    save_examples,
    trained,
)
from tests.launch import on_trainer_ranks as on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
CPU = json.loads(PRESETS.read_text(encoding="utf-8"))["cpu"]
LINE = 'sequence_parallel: "auto" for '


def said(function, *args, **given):
    """What it returns, and what it says of "auto"."""
    with contextlib.redirect_stderr(io.StringIO()) as told:
        found = function(*args, **given)
    return found, [line for line in told.getvalue().splitlines() if line.startswith(LINE)]


def window(size):
    return ragged({"size": size}, 1, 2)


def a_step(section, stage, **changes):
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as accelerate sets it on CPUs, for all ranks of a machine
    returned, lines = said(ds_seqpar.initialize, model=llama(), config=settings(section, stage, 2, 4, **changes))
    sp = returned[0].sequence_parallel
    shards = sp.shard_batches(window(sp.size)) if dist.get_world_size() == sp.size else []
    return step(returned[0], shards) if shards else None, lines, sp.config.settings()


def steps(sections):
    return [a_step(section, "3") for section in sections]


@pytest.mark.parametrize("ranks", each_then_rest([2], [4]))
def test_a_length_in_the_json_is_planned_for_and_memory_auto_changes_no_number(ranks, tmp_path):
    """The second time on a machine of so little memory that nothing fits."""
    (tmp_path / "small.json").write_text(json.dumps({**CPU, "memory": 1e5}), encoding="utf-8")
    gradients, loss = one_process(llama(), window(ranks))
    sparing = {"seq_len": 48, "memory": "auto", "machine": str(tmp_path / "small.json"), "mlp_tiles": 2}
    by_rank = on_ranks(ranks, steps, [{"seq_len": 48}, sparing])
    for rank, found in enumerate(by_rank):
        for made, _, _ in found:
            assert gap(made["gradients"], gradients) < 1e-5
            assert made["loss"] == pytest.approx(loss, rel=1e-6)
        (_, lines, config), (_, spared, settings) = found
        assert len(lines) == (rank == 0)
        assert config == by_rank[0][0][2]
        assert config["seq_len"] == 48
        assert (settings["memory"], settings["loss_tiles"], settings["mlp_tiles"]) == ("auto", "auto", 2)
        words = "loss_tiles auto", " GiB a rank where the machine has ", "gradient checkpointing would spare most"
        assert [missing(line, *words) for line in spared] == [[]] * (rank == 0)
    (line,) = by_rank[0][0][1]
    assert line.startswith(LINE)
    assert missing(line, "48 tokens", f"{ranks} ranks of these hosts, {ranks} a node") == []


def refusals(folder):
    rank, found = int(os.environ["RANK"]), {}
    content = json.loads(PRESETS.read_text(encoding="utf-8"))["modest"]
    (folder / str(rank)).mkdir()
    os.chdir(folder / str(rank))
    if rank:  # a machine's file that one rank has not
        Path("machine.json").write_text(json.dumps(content), encoding="utf-8")
    config = SequenceParallelConfig(seq_len=4096, machine="machine.json")
    job = job_of(small(), Job())
    found["a file that is not there"] = refusal(SequenceParallel, config, job=job)
    found["asked for by one rank"] = refusal(
        SequenceParallel, SequenceParallelConfig(seq_len=4096 if rank else "auto"), job=job
    )
    zero = {"stage": 3, "reduce_bucket_size": 5000 if rank else "many"}
    given = settings({"seq_len": 4096}, "3", 1, 4, zero_optimization=zero)
    found["a number that is none"] = refusal(ds_seqpar.initialize, model=small(), config=given)
    found["no model"] = refusal(SequenceParallel, SequenceParallelConfig(seq_len=4096))
    return found


def test_what_one_rank_cannot_plan_is_told_on_all(tmp_path):
    by_rank = on_ranks(2, refusals, tmp_path)
    for name in by_rank[0]:
        for kind, message in (found[name] for found in by_rank):
            assert kind in ("ConfigError", "DisagreementError")
            assert is_one_sentence(message), message
    assert missing(by_rank[1]["a file that is not there"][1], "machine.json") == []
    assert missing(by_rank[0]["asked for by one rank"][1], "rank 0: seq_len 'auto'", "rank 1: seq_len 4096") == []
    assert missing(by_rank[1]["a number that is none"][1], "reduce_bucket_size", "many") == []
    assert missing(by_rank[0]["no model"][1], "seq_len", "got 4096", "without a model") == []


class Lazy(Dataset):
    """Documents that are made when they are asked for."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def lists(count=96):
    return [{name: x.tolist() for name, x in one.items()} for one in documents(count)]


def collated(examples):
    return collate([{name: torch.as_tensor(x) for name, x in one.items()} for one in examples])


def runs(folder, cases):
    """name -> (its Run, what was said, the settings)."""
    found = {}
    for name, section in cases:
        arrow = datasets.Dataset.from_list(lists())
        data = {"asked": arrow, "not asked": arrow}
        parts = {"train_dataset": data.get(name, documents(96)), "data_collator": collated}
        trainer, lines = said(make, f"{folder}/{name}", 4, section, 2, parts=parts, max_steps=2)
        found[name] = trained(trainer), lines, trainer.sp.config.settings() if section else None
    return found


@pytest.mark.parametrize("ranks", each_then_rest([2], [4]))
def test_a_trainer_plans_for_the_longest_of_its_data_where_it_is_asked(ranks, tmp_path):
    plain = on_ranks(1, runs, tmp_path / "plain", [("plain", None)])[0]["plain"][0]
    cases = [("asked", {"size": ranks, "memory": "auto"}), ("not asked", {"size": ranks})]
    by_rank = on_ranks(ranks, runs, tmp_path, cases, timeout=300)
    for rank, found in enumerate(by_rank):
        run, lines, config = found["asked"]
        assert [line.startswith(LINE) for line in lines] == [True] * (rank == 0)
        assert run["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert run["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
        run, lines, config = found["not asked"]
        assert lines == []
        assert (config["size"], config["ulysses"], config["schedule"]) == (ranks, ranks, "ring")
        assert run["loss"] == pytest.approx(plain["loss"], rel=1e-5)


def test_the_longest_is_read_without_making_examples():
    examples = lists(40)
    lengths = [len(one["input_ids"]) for one in examples]
    whole = datasets.Dataset.from_list(examples)
    few = [3, 8, 20]
    assert longest_example(whole, "length") == max(lengths)
    assert longest_example(whole.select(few), "length") == max(lengths[n] for n in few)
    assert longest_example(whole.with_format("torch"), "length") == max(lengths)
    counted = whole.add_column("tokens", [7] * 40)
    assert (
        longest_example(counted, "tokens") == longest_example(counted.with_transform(lambda _: 1 // 0), "tokens") == 7
    )
    for unknown in (Lazy(examples), examples, None, whole.rename_column("input_ids", "ids"), whole.select([])):
        assert longest_example(unknown, "length") is None
    text = datasets.Dataset.from_dict({"input_ids": ["tokens", "to come"]})
    assert longest_example(text, "length") is None
    assert longest_example(whole.to_iterable_dataset(), "length") is None


def jobs(folder):
    from hf_integration.trainer.job import job_of_trainer

    packs = Packs(documents(12), 64)
    arrow = datasets.Dataset.from_list(lists(12))
    found = {}
    for name, data, collator in (("packs", packs, PackingCollator()), ("arrow", arrow, PackingCollator()),
                                 ("padded", arrow, collated)):  # fmt: skip
        trainer = make(f"{folder}/{name}", 2, {"size": 1}, parts={"train_dataset": data, "data_collator": collator})
        job = job_of_trainer(trainer, {"zero_optimization": {"stage": 3}})
        found[name] = job.seq, job.documents, job.batch, job.steps, job.dtype, job.zero.stage
    lengths = {name: [len(one["input_ids"]) for one in some] for name, some in (("documents", documents(12)),)}
    return found, max(sum(lengths["documents"][n] for n in pack) for pack in packs.packs), max(lengths["documents"])


def test_a_row_of_a_trainers_batch_is_what_its_collator_makes(tmp_path):
    ((found, pack, document),) = on_ranks(1, jobs, tmp_path)
    seq, parts, *rest = found["packs"]
    assert (seq, sum(parts), len(parts) % 2) == (2 * pack, 2 * pack, 0)
    assert rest == [1, 2, "float32", 3]
    assert found["arrow"] == (2 * document, (document,) * 2, 1, 2, "float32", 3)
    assert found["padded"] == (document, (), 2, 2, "float32", 3)


def objectives(folder):
    import trl
    from transformers import ByT5Tokenizer

    from hf_integration.look.sizes import model_sizes
    from hf_integration.trainer.job import job_of_trainer

    class Rollouts(SequenceParallelMixin, trl.GRPOTrainer):
        pass

    class Texts(SequenceParallelMixin, trl.SFTTrainer):
        pass

    grpo = {"num_generations": 4, "steps_per_generation": 3, "max_completion_length": 16, "beta": 0.1}
    given = fields(4, {"size": 1}, bf16=False, **grpo)
    model = policy()
    model.save_pretrained(f"{folder}/reference")  # from where trl loads it
    model.config._name_or_path = f"{folder}/reference"
    prompts = datasets.Dataset.from_list([{"prompt": "a"}] * 12)
    made = {
        "texts": Texts(
            model=policy(), args=trl.SFTConfig(f"{folder}/sft", **fields(4, {"size": 1}, bf16=False)),
            processing_class=ByT5Tokenizer(extra_ids=0), train_dataset=prompts.rename_column("prompt", "text"),
        ),
        "pairs": build(f"{folder}/pairs", case("DPO", reference), 1),
        "adapters": build(f"{folder}/adapters", case("DPO", lora), 1),
        "rollouts": Rollouts(
            model=model, args=trl.GRPOConfig(f"{folder}/grpo", **given), reward_funcs=lambda **_: [0.0] * 12,
            processing_class=ByT5Tokenizer(extra_ids=0), train_dataset=prompts,
        ),
    }  # fmt: skip
    job = {name: job_of_trainer(trainer, {"zero_optimization": {"stage": 2}}) for name, trainer in made.items()}
    adapted = made["adapters"].model
    trained = sum(x.numel() for x in adapted.parameters() if x.requires_grad)
    assert model_sizes(adapted.get_base_model()).trained == trained
    return {name: (x.batch, x.objective) for name, x in job.items()}


@pytest.mark.slow  # three Trainers of trl's, for what is read of them
def test_a_trainer_of_trls_says_what_its_steps_compute(tmp_path):
    save_examples(tmp_path)
    (found,) = on_ranks(1, objectives, tmp_path)
    assert found["texts"] == (4, Objective(head="fused", triton=False))
    pairs = {"rows": 2, "head": "fused", "triton": False}
    assert found["pairs"] == (4, Objective(reference=True, **pairs))
    assert found["adapters"] == (4, Objective(**pairs))
    rows = {"head": "fused", "triton": False, "reference": True, "generated": 12, "completion": 16}
    assert found["rollouts"] == (4, Objective(**rows))


def test_what_a_model_says_of_itself():
    model = model_of("llama")
    plain = job_of(model, Job(seq=64))
    assert (plain.window, plain.checkpointing, plain.seq) == (None, False, 64)
    assert plain.model.parameters == sum(x.numel() for x in model.parameters())
    model.gradient_checkpointing_enable()
    assert job_of(model, Job()).checkpointing
    windowed = model_of("mistral")
    assert job_of(windowed, Job()).window == windowed.config.sliding_window
    headless = job_of(model.model, Job(seq=64))
    assert (headless.model, headless.seq) == (None, None)
