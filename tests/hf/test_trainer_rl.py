"""trl's GRPOTrainer and RLOOTrainer with the mixin log what as many plain processes log as there are groups of ranks.

The noise in sampling is the same in both runs. No rank generates what another does.
"""

import collections.abc
import contextlib
import functools
import math
import zlib
from collections import Counter
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import Dataset
from transformers import (
    ByT5Tokenizer,
    GenerationMixin,
    Lfm2ForCausalLM,
    LlamaForSequenceClassification,
    LogitsProcessorList,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_integration import SequenceParallelMixin
from hf_integration.families import unwrapped
from hf_integration.inputs import TYPES
from hf_integration.model.forward import patch_of
from tests.dist.ranks import not_refused, refusal
from tests.grids import each_then_rest
from tests.hf.every_type import config_of
from tests.hf.llama import small
from tests.hf.trainers import fields
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
TIMES = ("runtime", "per_second", "step_time", "memory_gib")
LENGTH, ENDS = 6, [1, *range(60, 110)]  # of completions; the tokens that end one


class Keyed:
    """A trainer whose noise in sampling depends on the prompt, the number of its completion and the tokens before."""

    first = 250  # the token that stands for the first completion of a prompt

    def _generate_single_turn(self, *args, **kwargs):
        model = unwrapped(self.model)
        before, generate = vars(model).get("generate"), model.generate

        def numbered(*, input_ids, attention_mask, **given):
            """With the number of the completion in a token before the prompt."""
            ids, mask = (F.pad(x, (1, 0)) for x in (input_ids, attention_mask))
            seen = Counter()
            for row, (prompt, first) in enumerate(zip(input_ids.tolist(), (1 - attention_mask).sum(1), strict=True)):
                ids[row, first], mask[row, first] = self.first + seen[tuple(prompt)], 1
                seen[tuple(prompt)] += 1
            given |= {name: F.pad(given[name], (1, 0)) for name in {*TYPES} & {*given}}
            return generate(input_ids=ids, attention_mask=mask, **given)[:, 1:]

        model.generate = numbered
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            del model.generate
            if before is not None:
                model.generate = before


def draw(input_ids, scores):
    """A processor of logits that leaves one token for each row."""
    chosen = []
    for row, score in zip(input_ids.tolist(), scores, strict=True):
        key = zlib.crc32(repr([x for x in row if x]).encode())
        noise = torch.rand(len(score), generator=torch.Generator().manual_seed(key))
        chosen.append(int((score.log_softmax(-1) - (-noise.log()).log()).argmax()))
    return torch.full_like(scores, -math.inf).scatter(1, torch.tensor(chosen)[:, None], 0.0)


@contextlib.contextmanager
def keyed_noise():
    """Yields of each generation on this rank (whether other ranks share in it, its prompts without padding)."""
    processors, generate, multinomial = (
        GenerationMixin._get_logits_processor,
        GenerationMixin.generate,
        torch.multinomial,
    )
    generated = []

    @functools.wraps(generate)
    def counted(self, *, input_ids, attention_mask, **given):
        alone = patch_of(self) is None or patch_of(self).whole
        generated.append((not alone, [row[row > 0].tolist() for row in input_ids]))
        return generate(self, input_ids=input_ids, attention_mask=attention_mask, **given)

    GenerationMixin._get_logits_processor = lambda *args, **given: LogitsProcessorList(
        [*processors(*args, **given), draw]
    )
    GenerationMixin.generate = counted
    torch.multinomial = lambda probs, num_samples: probs.argmax(-1, keepdim=True)
    try:
        yield generated
    finally:
        GenerationMixin._get_logits_processor, GenerationMixin.generate = processors, generate
        torch.multinomial = multinomial


def letters(completions, log_extra, log_metric, **_):
    """How many different characters a completion has."""
    log_extra("length", [len(x) for x in completions])
    log_metric("longest", max(map(len, completions)))
    return [len(set(x)) / LENGTH for x in completions]


async def odd(completion_ids, number, **_):
    """How many of the tokens are odd; the column of the data set plays a part."""
    return [sum(x % 2 for x in ids) / LENGTH + n / 10 for ids, n in zip(completion_ids, number, strict=True)]


def model(seed=0, **changes):
    made = small(seed, vocab_size=259, pad_token_id=0, **changes)
    made.generation_config.eos_token_id = ENDS
    return made


def with_states():
    config = config_of("lfm2")
    config.vocab_size, config.pad_token_id, config.use_cache = 259, 0, True
    torch.manual_seed(0)
    return Lfm2ForCausalLM(config)


def lora():
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def experts():
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "pad_token_id": 0}
    made = MixtralForCausalLM(MixtralConfig(**sizes))
    made.generation_config.eos_token_id = ENDS
    return made


def scorer():
    torch.manual_seed(7)
    config = small(vocab_size=259, pad_token_id=0, num_labels=1).config
    config._name_or_path = "scorer"
    return LlamaForSequenceClassification(config).eval()


def prompts(count, seed=5, talks=False):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 14, (count,), generator=generator).tolist()
    texts = [chr(97 + i) * n for i, n in enumerate(lengths)]
    rows = [[{"role": "user", "content": x}] for x in texts] if talks else texts
    return Dataset.from_list([{"prompt": x, "number": n} for x, n in zip(rows, lengths, strict=True)])


def figures(history):
    """All that was logged but times, of each entry."""
    return [{k: v for k, v in entry.items() if not any(x in k for x in TIMES)} for entry in history]


# what is trained -> arguments of the trainer and of its configuration
SAVES = {
    **{"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3},
    **{"load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": True},
}
OFF_POLICY = {"num_iterations": 2}  # the second time, ratios are not 1
CASES = {
    **{
        f"{kind} of {level}s": lambda kind=kind, level=level: (
            {},
            {"loss_type": kind, "importance_sampling_level": level, **OFF_POLICY},
        )
        for kind in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
        for level in ("token", "sequence")
        if level == "token" or kind in ("grpo", "dapo", "luspo", "vespo")
    },
    "a reference": lambda: ({}, {"beta": 0.1, "use_bias_correction_kl": True, **OFF_POLICY}),
    "a reference that follows": lambda: (
        {},
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "stage": 3},
    ),
    "adapters": lambda: (
        {"peft_config": lora()},
        {"beta": 0.1, "loss_type": "dapo", "learning_rate": 3e-2, **OFF_POLICY},
    ),
    "adapters, in parts": lambda: ({"peft_config": lora()}, {"beta": 0.1, "stage": 3, "learning_rate": 3e-2}),
    "in parts": lambda: ({}, {"stage": 3, "loss_type": "dapo", **OFF_POLICY}),
    "in parts, by all ranks": lambda: ({}, {"stage": 3, "ds3_gather_for_generation": False}),
    "fewer generations than steps": lambda: ({}, {"steps_per_generation": 4, "max_steps": 5}),
    "more generations than steps": lambda: ({}, {"steps_per_generation": 1, "gradient_accumulation_steps": 4}),
    "many masks": lambda: (
        {},
        {
            **{
                "log_completions": True,
                "mask_truncated_completions": True,
                "top_entropy_quantile": 0.4,
                "off_policy_mask_threshold": 1e-4,
            },
            **{"epsilon": 1e-3, "delta": 1.001, **OFF_POLICY},
        },
    ),
    "entropy": lambda: ({}, {"entropy_coef": 0.1, "scale_rewards": "batch", "loss_type": "dr_grpo"}),
    "entropy that adapts": lambda: (
        {},
        {"use_adaptive_entropy": True, "entropy_target": 5.6, "multi_objective_aggregation": "normalize_then_sum"},
    ),
    "a head in fp32": lambda: ({}, {"cast_lm_head_to_fp32": True, "scale_rewards": "none", "repetition_penalty": 1.2}),
    "experts": lambda: ({"model": experts}, {"router_aux_loss_coef": 0.5, **OFF_POLICY}),
    "conversations": lambda: ({"reward_funcs": [odd], "talks": True}, {"loss_type": "dapo"}),
    "resumed": lambda: ({}, {**SAVES, "steps_per_generation": 2}),
    "resumed, adapters in parts": lambda: (
        {"peft_config": lora()},
        {**SAVES, "stage": 3, "beta": 0.1, "learning_rate": 3e-2},
    ),
    "a stream": lambda: ({"stream": True}, {"eval_strategy": "steps", "eval_steps": 2}),
    "a model of rewards": lambda: ({"reward_funcs": [letters, scorer(), odd]}, {"reward_weights": [1.0, 30.0, 0.5]}),
    "a model of rewards, in parts": lambda: ({"reward_funcs": [scorer()]}, {"stage": 3}),
    "long rows together": lambda: ({"group_generation_over": 14}, {}),
    "evaluation": lambda: ({}, {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 4}),
    "rloo": lambda: ({}, {"num_iterations": 2}),
    "rloo, adapters": lambda: ({"peft_config": lora()}, {"learning_rate": 3e-2, "normalize_advantages": True}),
    "rloo, in parts": lambda: ({}, {"stage": 3, "reward_clip_range": (0.2, 1.2), "mask_truncated_completions": True}),
    "rloo, experts": lambda: ({"model": experts}, {"router_aux_loss_coef": 0.5, "beta": 0.0}),
    "rloo, evaluation": lambda: (
        {"group_generation_over": 14},
        {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 1},
    ),
}


QUICK = ("adapters", "in parts", "a model of rewards", "long rows together", "many masks", "resumed", "rloo")
# what groups do together, or each in its own way
OF_GROUPS = (
    *("dapo of tokens", "adapters, in parts", "in parts", "in parts, by all ranks", "resumed", "many masks"),
    *("entropy that adapts", "long rows together", "rloo, evaluation"),
)
TOGETHER = ("in parts, by all ranks", "long rows together", "rloo, evaluation")  # where ranks share a generation


def trainer_of(folder, name, size=None, between=(Keyed,), parts=None, steps=2, **changes):
    """A plain trainer, or one in which `size` ranks share sequences.

    between: classes before trl's; parts: the trainer's own arguments; changes: of its configuration.
    """
    import trl

    kind = "RLOO" if name.startswith("rloo") else "GRPO"
    plain, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    unset_hf_deepspeed_config()  # by that of the trainer before, models would be made in parts
    own, settings = CASES[name]()
    own |= parts or {}
    talks, stream, tokenizer = own.pop("talks", False), own.pop("stream", False), ByT5Tokenizer(extra_ids=0)
    if talks:
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    data = {"train_dataset": prompts(24, talks=talks), "eval_dataset": prompts(4, 9, talks)}
    if any(isinstance(x, torch.nn.Module) for x in own.get("reward_funcs", ())):
        own["reward_processing_classes"] = [ByT5Tokenizer(extra_ids=0) for _ in own["reward_funcs"]]
    if not size:
        own.pop("group_generation_over", None)
    policy = own.pop("model", model)()
    policy.config._name_or_path = str(Path(folder).parents[1] / "reference")  # from where trl loads one
    how = {
        **{"max_steps": steps, "bf16": False, "num_generations": 2, "max_completion_length": LENGTH},
        **{"temperature": 0.9, **settings, **changes},
    }
    given = fields(4, size and {"size": size}, **how)
    del given["deepspeed"]["train_batch_size"]  # DeepSpeed counts ranks while a reference is loaded in parts
    return type("Tried", (*([SequenceParallelMixin] if size else []), *between, plain), {})(
        model=policy, args=config(str(folder), **given),
        **{name: x.to_iterable_dataset() if stream else x for name, x in data.items()}
        | {"reward_funcs": [letters, odd], "processing_class": tokenizer, **own},
    )  # fmt: skip


def run(folder, name, size, steps):
    """(what is logged, the table of completions, the prompts of each generation on this rank)."""
    with keyed_noise() as generated:
        trainer = trainer_of(folder, name, size, steps=steps)
        trainer.train()
        if name.startswith("resumed"):
            before, trainer = trainer, trainer_of(folder, name, size)
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
            trainer.evaluate()  # the best, which was loaded
            best = trainer.state.best_model_checkpoint.rpartition("/")[2]
            trainer.state.log_history += [*before.state.log_history, {"best": best}]
    models = [x for x in trainer.reward_funcs if isinstance(x, torch.nn.Module)]
    assert not size or all(patch_of(unwrapped(x)) for x in models)  # they share sequences too
    tables = {name: dict(x) if isinstance(x, dict) else [*x] for name, x in trainer._logs.items()}
    return figures(trainer.state.log_history), tables, generated


def runs(folder, names, size, steps):
    torch.manual_seed(3)
    return {name: run(f"{folder}/{name} {size}", name, size, steps) for name in names}


def same(one, other):
    """Whether two logs, lists or figures are the same but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, str) or not isinstance(one, collections.abc.Iterable):
        return one == (pytest.approx(other, rel=1e-5, abs=1e-5) if isinstance(one, float) else other)
    return len(one) == len(other) and all(map(same, one, other))


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (QUICK, 2),
        *(pytest.param([*CASES][part::5], 2, marks=pytest.mark.slow) for part in range(5)),
        *(pytest.param(OF_GROUPS[part::2], 4, marks=pytest.mark.slow) for part in range(2)),
    ],
)
def test_all_that_is_logged_is_trls(names, ranks, tmp_path):
    groups, steps = ranks // 2, 2 if names is QUICK else {2: 5, 4: 3}[ranks]
    model(seed=1).save_pretrained(tmp_path / "reference")
    plain = on_ranks(groups, runs, tmp_path / "plain", names, None, steps, timeout=250)
    shared = on_ranks(ranks, runs, tmp_path / "shared", names, 2, steps, timeout=250)
    for name in names:
        for rank, found in enumerate(shared):
            (history, tables, _), (of_trl, trls_tables, _) = found[name], plain[rank // 2][name]
            assert [entry.keys() for entry in history] == [entry.keys() for entry in of_trl], name
            for entry, trls in zip(history, of_trl, strict=True):
                for figure in trls:
                    assert same(entry[figure], trls[figure]), (name, rank, figure, entry[figure], trls[figure])
            assert same(tables, trls_tables), (name, tables, trls_tables)
        for group in range(groups):
            first, second = (shared[2 * group + rank][name][2] for rank in range(2))
            assert [rows for together, rows in first if together] == [rows for together, rows in second if together]
            rows = [row for _, rows in first for row in rows]
            rows += [row for together, rows in second for row in rows if not together]
            assert sorted(rows) == sorted(row for _, rows in plain[group][name][2] for row in rows), name  # each once
            if name not in TOGETHER:
                assert len(rows) // 2 <= len([row for _, rows in first for row in rows]) <= len(rows) // 2 + 1


def search(query: str) -> str:
    """
    Looks something up.

    Args:
        query: What to look up.

    Returns:
        What was found.
    """
    return query


class World:
    """An environment."""

    def reset(self, **_):
        return None

    def get_reward(self):
        return 1.0


class OwnRewards:
    """A class before trl's with rewards of its own."""

    def _calculate_rewards(self, *args):
        return super()._calculate_rewards(*args) * 2


def calls_tools():
    """A tokenizer whose template has tools."""
    import trl

    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath("qwen3.jinja").read_text()
    return tokenizer


def broken(completions, **_):
    raise KeyError("no such answer")


# what is wrong -> (of `trainer_of`, words of the sentence)
WRONG = {
    "a rollout function": (lambda: {"parts": {"rollout_func": print}}, ["got rollout_func"]),
    "tools": (lambda: {"parts": {"tools": [search], "processing_class": calls_tools()}}, ["got tools"]),
    "an environment": (
        lambda: {"parts": {"environment_factory": World, "processing_class": calls_tools()}},
        ["got environment_factory"],
    ),
    "vLLM in the ranks": (lambda: {"use_vllm": True, "vllm_mode": "colocate"}, ["server", "vllm_mode='colocate'"]),
    "continuous batching": (
        lambda: {"use_transformers_continuous_batching": True},
        ["got use_transformers_continuous_batching"],
    ),
    "too few rows": (lambda: {"num_generations": 16}, ["num_generations, 16", "got 4 x 1 x 2", "a group"]),
    "too few rows of an evaluation": (
        lambda: {"num_generations_eval": 8, "eval_strategy": "steps", "eval_steps": 1},
        ["per_device_eval_batch_size", "8; got 4 x 1"],
    ),
    "rewards of a class between": (lambda: {"between": [OwnRewards]}, ["got OwnRewards", "_calculate_rewards"]),
    "rewards of a class with the name of trl's": (
        lambda: {"between": [type("GRPOTrainer", (), dict(_calculate_rewards=OwnRewards._calculate_rewards))]},
        ["got GRPOTrainer", "_calculate_rewards"],
    ),
    "a length in words": (lambda: {"parts": {"group_generation_over": "8K"}}, ["whole number", "got '8K'"]),
    "a length for a policy with states": (
        lambda: {"parts": {"model": with_states, "group_generation_over": 14}},
        ["got group_generation_over=14", "use_cache"],
    ),
    "parameters in parts of a policy with states": (
        lambda: {"parts": {"model": with_states}, "stage": 3, "ds3_gather_for_generation": False},
        ["got ds3_gather_for_generation=False", "use_cache"],
    ),
    "settings that differ": (
        lambda: {"temperature": 1.0 + dist.get_rank()},
        ["temperature 1.0", "temperature 2.0"],
    ),
    "prompts that differ": (
        lambda: {"parts": {"train_dataset": prompts(24, dist.get_rank())}},
        ["rank", "whole batches"],
    ),
    "no prompts": (
        lambda: {"parts": {"train_dataset": prompts(24).rename_column("prompt", "text")}},
        ["prompt", "got number, text"],
    ),
    "a reward that fails": (lambda: {"parts": {"reward_funcs": [broken]}}, ["computing rewards", "no such answer"]),
    "rewards that are too few": (
        lambda: {"parts": {"reward_funcs": [lambda completions, **_: completions[1:]]}},
        ["computing rewards", "7 rewards", "8 were expected"],
    ),
    "a generation that fails": (lambda: {"between": [FailsOnOne]}, ["generating", "out of memory"]),
}


class FailsOnOne(Keyed):
    """Whose model generates on the first rank alone."""

    def _generate_single_turn(self, *args, **kwargs):
        def generate(model, **_):
            if dist.get_rank():
                raise torch.OutOfMemoryError("out of memory")
            return GenerationMixin.generate(model, **_)

        type(unwrapped(self.model)).generate = generate
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            del type(unwrapped(self.model)).generate


def try_wrong(folder, names):
    """What is said of each, by name: (kind, sentence, steps made)."""
    found, made = {}, []
    for name in names:

        def attempt(name=name):
            made.append(trainer_of(f"{folder}/{name}", "entropy", 2, **WRONG[name][0]()))
            made[-1].train()

        found[name] = *refusal(attempt), sum(trainer.state.global_step for trainer in made)
    return found


SELDOM = "parameters in parts of a policy with states"


@pytest.mark.parametrize("names", each_then_rest([[name for name in WRONG if name != SELDOM]], [[SELDOM]]))
def test_what_cannot_be_divided_and_what_fails_on_one_rank_is_an_error_of_all(names, tmp_path):
    for found in on_ranks(2, try_wrong, tmp_path / "x", names):
        assert not_refused(found, {name: WRONG[name] for name in names}) == {}


def noise(folder):
    """(completions of two equal runs, whether a generation leaves random numbers alone, 8 completions of a prompt, the
    speeds that are logged)."""
    runs, speeds = [], []

    class Speeds(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            speeds.append(logs.get("tokens_per_second"))

    for number in range(2):
        trainer = trainer_of(f"{folder}/{number}", "entropy", 2, between=(), steps=1)
        trainer.add_callback(Speeds)
        trainer.train()
        runs.append([*trainer._logs["completion"]])
    before = torch.get_rng_state()
    alike, _ = trainer._generate_single_turn([[100, 101, 1]] * 8, None, {}, 8)
    return runs, bool(before.equal(torch.get_rng_state())), alike, speeds


def test_ranks_draw_noise_of_their_own_which_a_second_run_draws_again(tmp_path):
    found = on_ranks(2, noise, tmp_path / "x")
    for (first, second), left_alone, alike, speeds in found:
        assert len([x for x in speeds if x]) == 2
        assert first == second
        assert left_alone
        assert alike == found[0][2]
        assert len({*map(tuple, alike)}) > 4  # as many as a rank draws


def with_own_noise(folder, size):
    trainer = trainer_of(f"{folder}/{size}", "fewer generations than steps", size, between=())
    trainer.train()
    return figures(trainer.state.log_history), [*trainer._logs["completion"]]


@pytest.mark.slow
def test_one_rank_a_group_draws_and_logs_what_plain_trl_does(tmp_path):
    plain, alone = (on_ranks(2, with_own_noise, tmp_path / "x", size) for size in (None, 1))
    assert all(map(same, plain, alone))


def few_rows(folder, size):
    """Of two rows in a batch: (what is logged, the rows that this rank generates)."""
    with keyed_noise() as generated:
        for name in ("rloo", "in parts"):
            changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
            trainer = trainer_of(f"{folder}/{size} {name}", name, size, **changes)
            trainer.train()
    return figures(trainer.state.log_history), sum(len(rows) for _, rows in generated)


@pytest.mark.slow
def test_ranks_without_a_row_wait_for_the_others(tmp_path):
    model(seed=1).save_pretrained(tmp_path / "reference")
    (plain, rows), *_ = on_ranks(1, few_rows, tmp_path / "x", None)
    found = on_ranks(4, few_rows, tmp_path / "x", 4)
    assert all(same(logs, plain) for logs, _ in found)
    assert [divided for _, divided in found] == [rows // 2, rows // 2, 0, 0]
