"""trl's GRPOTrainer and RLOOTrainer with the mixin log what as many plain processes log as there are groups of ranks.

The noise in sampling is the same in both runs. No rank generates what another does.
"""

from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import (
    ByT5Tokenizer,
    GenerationMixin,
    Lfm2ForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
)

from hf_integration.families import unwrapped
from tests.grids import each_then_rest
from tests.hf.every_type import config_of
from tests.hf.llama import small
from tests.hf.rollouts import ENDS, Keyed, letters, odd, prompts
from tests.hf.trainers import assert_refused, build, case, compare, differences, untimed
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")


def with_states():
    config = config_of("lfm2")
    config.vocab_size, config.pad_token_id, config.use_cache = 259, 0, True
    torch.manual_seed(0)
    return {"model": Lfm2ForCausalLM(config)}


def lora():
    return {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}


def experts():
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "pad_token_id": 0}
    made = MixtralForCausalLM(MixtralConfig(**sizes))
    made.generation_config.eos_token_id = ENDS
    return {"model": made}


def scorer():
    torch.manual_seed(7)
    config = small(vocab_size=259, pad_token_id=0, num_labels=1).config
    config._name_or_path = "scorer"
    return LlamaForSequenceClassification(config).eval()


def scored():
    tokenizers = [ByT5Tokenizer(extra_ids=0) for _ in range(3)]
    return {"reward_funcs": [letters, scorer(), odd], "reward_processing_classes": tokenizers}


def scored_alone():
    return {"reward_funcs": [scorer()], "reward_processing_classes": [ByT5Tokenizer(extra_ids=0)]}


def conversations():
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    data = {"train_dataset": prompts(24, talks=True), "eval_dataset": prompts(4, 9, talks=True)}
    return {**data, "reward_funcs": [odd], "processing_class": tokenizer}


def streams():
    data = {"train_dataset": prompts(24), "eval_dataset": prompts(4, 9)}
    return {name: x.to_iterable_dataset() for name, x in data.items()}


def grpo(parts=dict, **changes):
    return case("GRPO", parts, **changes)


def rloo(parts=dict, **changes):
    return case("RLOO", parts, **changes)


SAVES = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3, "load_best_model_at_end": True}
SAVES |= {"metric_for_best_model": "reward", "greater_is_better": True, "resume_at": 1}
OFF_POLICY = {"num_iterations": 2}  # the second time, ratios are not 1
FAST = {"learning_rate": 3e-2}  # of adapters
TOGETHER = {"ours": {"group_generation_over": 14}}
SEQUENCES = ("grpo", "dapo", "luspo", "vespo")  # losses that may weigh whole completions
MASKS = {"log_completions": True, "mask_truncated_completions": True, "top_entropy_quantile": 0.4}
MASKS |= {"off_policy_mask_threshold": 1e-4, "epsilon": 1e-3, "delta": 1.001}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 5.6}
CASES = {
    **{
        f"{loss} of {level}s": grpo(loss_type=loss, importance_sampling_level=level, **OFF_POLICY)
        for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
        for level in ("token", "sequence")
        if level == "token" or loss in SEQUENCES
    },
    "a reference": grpo(beta=0.1, use_bias_correction_kl=True, **OFF_POLICY),
    "a reference that follows": grpo(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, stage=3),
    "adapters, in parts": grpo(lora, beta=0.1, stage=3, **FAST),
    "in parts, by all ranks": grpo(stage=3, ds3_gather_for_generation=False),
    "fewer generations than steps": grpo(steps_per_generation=4, max_steps=5),
    "more generations than steps": grpo(steps_per_generation=1, gradient_accumulation_steps=4),
    "entropy": grpo(entropy_coef=0.1, scale_rewards="batch", loss_type="dr_grpo"),
    "entropy that adapts": grpo(**ADAPTIVE, multi_objective_aggregation="normalize_then_sum"),
    "a head in fp32": grpo(cast_lm_head_to_fp32=True, scale_rewards="none", repetition_penalty=1.2),
    "experts": grpo(experts, router_aux_loss_coef=0.5, **OFF_POLICY),
    "conversations": grpo(conversations, loss_type="dapo"),
    "resumed, adapters in parts": grpo(lora, **SAVES, stage=3, beta=0.1, **FAST),
    "a stream": grpo(streams, eval_strategy="steps", eval_steps=2),
    "a model of rewards, in parts": grpo(scored_alone, stage=3),
    "evaluation": grpo(eval_strategy="steps", eval_steps=1, num_generations_eval=4),
    "rloo, adapters": rloo(lora, normalize_advantages=True, **FAST),
    "rloo, in parts": rloo(stage=3, reward_clip_range=(0.2, 1.2), mask_truncated_completions=True),
    "rloo, experts": rloo(experts, router_aux_loss_coef=0.5, beta=0.0),
    "rloo, evaluation": rloo(**TOGETHER, eval_strategy="steps", eval_steps=2, num_generations_eval=1),
    "adapters": grpo(lora, beta=0.1, loss_type="dapo", **FAST, **OFF_POLICY),
    "in parts": grpo(stage=3, loss_type="dapo", **OFF_POLICY),
    "a model of rewards": grpo(scored, reward_weights=[1.0, 30.0, 0.5]),
    "long rows together": grpo(**TOGETHER),
    "many masks": grpo(**MASKS, **OFF_POLICY),
    "resumed": grpo(**SAVES, steps_per_generation=2),
    "rloo": rloo(num_iterations=2),
}
# what groups do together, or each in its own way
OF_GROUPS = (
    *("dapo of tokens", "adapters, in parts", "in parts", "in parts, by all ranks", "resumed", "many masks"),
    *("entropy that adapts", "long rows together", "rloo, evaluation"),
)


@pytest.mark.parametrize(
    ("names", "ranks", "steps"),
    [
        (("in parts", "long rows together", "resumed", "rloo"), 2, 2),
        *(pytest.param([*CASES][part::5], 2, 5, marks=pytest.mark.slow) for part in range(5)),
        *(pytest.param(OF_GROUPS[part::2], 4, 3, marks=pytest.mark.slow) for part in range(2)),
    ],
)
def test_all_that_is_logged_is_trls(names, ranks, steps, tmp_path):
    compare(tmp_path, {name: CASES[name] for name in names}, (ranks, 2), batch=2 * ranks, max_steps=steps)


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


def given(**parts):
    """A case with these arguments of the Trainer."""
    return grpo(parts)


def with_tools(**parts):
    return given(**parts, processing_class=calls_tools())


NAMESAKE = type("GRPOTrainer", (), {"_calculate_rewards": OwnRewards._calculate_rewards})
# what is wrong -> (the case, or what makes it; words of the sentence)
WRONG = {
    "a rollout function": (given(rollout_func=print), ["got rollout_func"]),
    "tools": (lambda: with_tools(tools=[search]), ["got tools"]),
    "an environment": (lambda: with_tools(environment_factory=World), ["got environment_factory"]),
    "vLLM in the ranks": (grpo(use_vllm=True, vllm_mode="colocate"), ["server", "vllm_mode='colocate'"]),
    "continuous batching": (
        grpo(use_transformers_continuous_batching=True),
        ["got use_transformers_continuous_batching"],
    ),
    "too few rows": (grpo(num_generations=16), ["num_generations, 16", "got 4 x 1 x 2", "a group"]),
    "too few rows of an evaluation": (
        grpo(num_generations_eval=8, eval_strategy="steps", eval_steps=1),
        ["per_device_eval_batch_size", "8; got 4 x 1"],
    ),
    "rewards of a class between": (given(between=[OwnRewards]), ["got OwnRewards", "_calculate_rewards"]),
    "rewards of a class with the name of trl's": (given(between=[NAMESAKE]), ["got GRPOTrainer", "_calculate_rewards"]),
    "a length in words": (grpo(ours={"group_generation_over": "8K"}), ["whole number", "got '8K'"]),
    "a length for a policy with states": (grpo(with_states, **TOGETHER), ["got group_generation_over=14", "use_cache"]),
    "parameters in parts of a policy with states": (
        grpo(with_states, stage=3, ds3_gather_for_generation=False),
        ["got ds3_gather_for_generation=False", "use_cache"],
    ),
    "settings that differ": (lambda: grpo(temperature=1.0 + dist.get_rank()), ["temperature 1.0", "temperature 2.0"]),
    "prompts that differ": (lambda: given(train_dataset=prompts(24, dist.get_rank())), ["rank", "whole batches"]),
    "no prompts": (
        lambda: given(train_dataset=prompts(24).rename_column("prompt", "text")),
        ["prompt", "got number, text"],
    ),
    "a reward that fails": (given(reward_funcs=[broken]), ["computing rewards", "no such answer"]),
    "rewards that are too few": (
        given(reward_funcs=[lambda completions, **_: completions[1:]]),
        ["computing rewards", "7 rewards", "8 were expected"],
    ),
    "a generation that fails": (given(between=[FailsOnOne]), ["generating", "out of memory"]),
}
SELDOM = "parameters in parts of a policy with states"


@pytest.mark.parametrize("names", each_then_rest([[name for name in WRONG if name != SELDOM]], [[SELDOM]]))
def test_what_cannot_be_divided_and_what_fails_on_one_rank_is_an_error_of_all(names, tmp_path):
    assert_refused(tmp_path, __name__, names)


def unkeyed():
    return {"between": ()}


def noise(folder):
    """(completions of two equal runs, whether a generation leaves random numbers alone, 8 completions of a prompt, the
    speeds that are logged)."""
    runs, speeds = [], []

    class Speeds(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            speeds.append(logs.get("tokens_per_second"))

    for number in range(2):
        trainer = build(f"{folder}/{number}", grpo(unkeyed, max_steps=1), 2)
        trainer.add_callback(Speeds)
        trainer.train()
        runs.append([*trainer._logs["completion"]])
    before = torch.get_rng_state()
    alike, _ = trainer._generate_single_turn([[100, 101, 1]] * 8, None, {}, 8)
    return runs, bool(before.equal(torch.get_rng_state())), alike, speeds


def test_ranks_draw_noise_of_their_own_which_a_second_run_draws_again(tmp_path):
    found = on_ranks(2, noise, tmp_path)
    for (first, second), left_alone, alike, speeds in found:
        assert len([x for x in speeds if x]) == 2
        assert first == second
        assert left_alone
        assert alike == found[0][2]
        assert len({*map(tuple, alike)}) > 4  # as many as a rank draws


def with_own_noise(folder, size):
    given = {**CASES["fewer generations than steps"], "parts": unkeyed}
    trainer = build(f"{folder}/{size}", given, size, batch=8)
    trainer.train()
    return untimed(trainer.state.log_history), [*trainer._logs["completion"]]


@pytest.mark.slow
def test_one_rank_a_group_draws_and_logs_what_plain_trl_does(tmp_path):
    plain, alone = (on_ranks(2, with_own_noise, tmp_path, size) for size in (None, 1))
    assert differences(plain, alone, within=1e-5) == []


@pytest.mark.slow
def test_ranks_without_a_row_wait_for_the_others(tmp_path):
    """Of two rows in a batch."""
    cases = {name: {**CASES[name], "gradient_accumulation_steps": 1} for name in ("rloo", "in parts")}
    compare(tmp_path, cases, (4, 4), batch=2, max_steps=2)
