"""trl's GRPOTrainer and RLOOTrainer with the mixin log what as many plain processes log as there are groups of ranks.

The noise in sampling is the same in both runs. No rank generates what another does.
"""

import collections.abc
import contextlib
import math
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import ByT5Tokenizer, GenerationMixin, LogitsProcessorList

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


def prompts(count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 14, (count,), generator=generator).tolist()
    return Dataset.from_list([{"prompt": chr(97 + i) * n, "number": n} for i, n in enumerate(lengths)])


def figures(history):
    """All that was logged but times, of each entry."""
    return [{k: v for k, v in entry.items() if not any(x in k for x in TIMES)} for entry in history]


# what is trained -> arguments of the trainer and of its configuration
CASES = {
    "grpo": lambda: ({}, {"loss_type": "grpo", "num_iterations": 2}),
    "rloo": lambda: ({}, {}),
}


def run(folder, name, size):
    """(what is logged, the completions of the last steps, the prompts of each generation on this rank)."""
    import trl

    kind = "RLOO" if name.startswith("rloo") else "GRPO"
    trainer, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    own, changes = CASES[name]()
    policy = own.pop("model", model)()
    policy.config._name_or_path = str(Path(folder).parents[1] / "reference")  # from where trl loads one
    how = {
        **{"max_steps": 3, "bf16": False, "num_generations": 2, "max_completion_length": LENGTH},
        **{"log_completions": True, "temperature": 0.9, **changes},
    }
    with keyed_noise() as generated:
        made = type("Tried", (*([SequenceParallelMixin] if size else []), Keyed, trainer), {})(
            model=policy, args=config(str(folder), **fields(4, size and {"size": size}, **how)),
            processing_class=ByT5Tokenizer(extra_ids=0), train_dataset=prompts(12), eval_dataset=prompts(4, 9),
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
    [(("grpo", "rloo"), 2), pytest.param(tuple(CASES), 4, marks=pytest.mark.whole)],
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
