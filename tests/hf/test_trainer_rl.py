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
import torch.nn.functional as F
from datasets import Dataset
from transformers import (
    ByT5Tokenizer,
    GenerationMixin,
    LlamaForSequenceClassification,
    LogitsProcessorList,
    MixtralConfig,
    MixtralForCausalLM,
)

from hf_integration import SequenceParallelMixin
from hf_integration.families import unwrapped
from tests.hf.llama import small
from tests.hf.trainers import fields
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
TIMES = ("runtime", "per_second", "step_time", "memory_gib")
LENGTH, ENDS = 6, [1, *range(60, 110)]  # of completions; the tokens that end one


class Keyed:
    """A trainer whose noise in sampling depends on the prompt, the number of its completion and the tokens before."""

    def _generate_single_turn(self, *args, **kwargs):
        model = unwrapped(self.model)
        before, generate = vars(model).get("generate"), model.generate

        def numbered(*, input_ids, attention_mask, **given):
            """With the number of the completion in a token before the prompt."""
            ids, mask = (F.pad(x, (1, 0)) for x in (input_ids, attention_mask))
            seen = Counter()
            for row, (prompt, first) in enumerate(zip(input_ids.tolist(), (1 - attention_mask).sum(1), strict=True)):
                ids[row, first], mask[row, first] = 250 + seen[tuple(prompt)], 1
                seen[tuple(prompt)] += 1
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
    """Yields the prompts of each generation on this rank, without padding."""
    processors, generate, multinomial = (
        GenerationMixin._get_logits_processor,
        GenerationMixin.generate,
        torch.multinomial,
    )
    generated = []

    @functools.wraps(generate)
    def counted(self, *, input_ids, attention_mask, **given):
        generated.append([row[row > 0].tolist() for row in input_ids])
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


def prompts(count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 14, (count,), generator=generator).tolist()
    return Dataset.from_list([{"prompt": chr(97 + i) * n, "number": n} for i, n in enumerate(lengths)])


def figures(history):
    """All that was logged but times, of each entry."""
    return [{k: v for k, v in entry.items() if not any(x in k for x in TIMES)} for entry in history]


# what is trained -> arguments of the trainer and of its configuration
OFF_POLICY = {"num_iterations": 2}  # the second time, ratios are not 1
CASES = {
    **{
        f"{kind} of {level}s": lambda kind=kind, level=level: (
            {},
            {"loss_type": kind, "importance_sampling_level": level, **OFF_POLICY},
        )
        for kind in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
        for level in ("token", "sequence")
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
            **{"mask_truncated_completions": True, "top_entropy_quantile": 0.4, "off_policy_mask_threshold": 1e-4},
            **{"epsilon": 1e-3, "delta": 1.001, **OFF_POLICY},
        },
    ),
    "entropy": lambda: ({}, {"entropy_coef": 0.1, "scale_rewards": "batch", "loss_type": "dr_grpo"}),
    "entropy that adapts": lambda: (
        {},
        {"use_adaptive_entropy": True, "entropy_target": 5.6, "multi_objective_aggregation": "normalize_then_sum"},
    ),
    "a head in fp32": lambda: ({}, {"cast_lm_head_to_fp32": True, "scale_rewards": "none"}),
    "experts": lambda: ({"model": experts}, {"router_aux_loss_coef": 0.5, **OFF_POLICY}),
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


def run(folder, name, size):
    """(what is logged, the completions of the last steps, the prompts of each generation on this rank)."""
    import trl

    kind = "RLOO" if name.startswith("rloo") else "GRPO"
    trainer, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    own, changes = CASES[name]()
    stream, policy = own.pop("stream", False), own.pop("model", model)()
    scores = sum(isinstance(x, torch.nn.Module) for x in own.get("reward_funcs", ()))
    if scores:
        own["reward_processing_classes"] = [ByT5Tokenizer(extra_ids=0) for _ in own["reward_funcs"]]
    if not size:
        own.pop("group_generation_over", None)
    data = [x.to_iterable_dataset() if stream else x for x in (prompts(12), prompts(4, 9))]
    policy.config._name_or_path = str(Path(folder).parents[1] / "reference")  # from where trl loads one
    how = {
        **{"max_steps": 3, "bf16": False, "num_generations": 2, "max_completion_length": LENGTH},
        **{"log_completions": True, "temperature": 0.9, **changes},
    }
    given = fields(4, size and {"size": size}, **how)
    del given["deepspeed"]["train_batch_size"]  # DeepSpeed counts ranks while a reference is loaded in parts
    with keyed_noise() as generated:
        made = type("Tried", (*([SequenceParallelMixin] if size else []), Keyed, trainer), {})(
            model=policy, args=config(str(folder), **given),
            processing_class=ByT5Tokenizer(extra_ids=0), train_dataset=data[0], eval_dataset=data[1],
            **{"reward_funcs": [letters, odd], **own},
        )  # fmt: skip
        made.train()
    tables = {name: dict(x) if isinstance(x, dict) else [*x] for name, x in made._logs.items()}
    return figures(made.state.log_history), tables, generated


def runs(folder, names, size):
    torch.manual_seed(3)
    return {name: run(f"{folder}/{name} {size}", name, size) for name in names}


def same(one, other):
    """Whether two logs, lists or figures are the same but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, str) or not isinstance(one, collections.abc.Iterable):
        return one == (pytest.approx(other, rel=1e-5, abs=1e-6) if isinstance(one, float) else other)
    return len(one) == len(other) and all(map(same, one, other))


@pytest.mark.parametrize(
    ("names", "ranks"),
    [(("grpo of tokens", "rloo"), 2), pytest.param(tuple(CASES), 4, marks=pytest.mark.whole)],
)
def test_all_that_is_logged_is_trls(names, ranks, tmp_path):
    groups = ranks // 2
    model(seed=1).save_pretrained(tmp_path / "reference")
    plain = on_ranks(groups, runs, tmp_path / "plain", names, None, timeout=250)
    shared = on_ranks(ranks, runs, tmp_path / "shared", names, 2, timeout=250)
    for name in names:
        for rank, found in enumerate(shared):
            (history, tables, _), (of_trl, trls_tables, _) = found[name], plain[rank // 2][name]
            assert [entry.keys() for entry in history] == [entry.keys() for entry in of_trl], name
            for entry, trls in zip(history, of_trl, strict=True):
                for figure in trls:
                    assert same(entry[figure], trls[figure]), (name, rank, figure, entry[figure], trls[figure])
            assert same(tables, trls_tables), (name, tables, trls_tables)
        for group in range(groups):
            divided = [shared[rank][name][2] for rank in (2 * group, 2 * group + 1)]
            for number, of_one in enumerate(plain[group][name][2]):
                rows = [row for of_rank in divided for row in of_rank[number]]
                assert sorted(rows) == sorted(of_one), name  # each once
                assert len(divided[0][number]) - len(divided[1][number]) in (0, 1)
