"""Prompts, rewards and a policy of trl's GRPOTrainer and RLOOTrainer, and the noise by which they sample: it depends on
the prompt, the number of its completion and the tokens before, so that a plain run samples what a shared one does."""

import contextlib
import functools
import math
import zlib
from collections import Counter

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import GenerationMixin, LogitsProcessorList

from hf_integration.families import unwrapped
from hf_integration.inputs import TYPES
from hf_integration.model.forward import patch_of
from tests.hf.llama import small

LENGTH, ENDS = 6, [1, *range(60, 110)]  # of completions; the tokens that end one


class Keyed:
    """A trainer that puts the number of a completion before its prompt, where `draw` reads it."""

    first = 250  # the token that stands for the first completion of a prompt

    def _generate_single_turn(self, *args, **kwargs):
        model = unwrapped(self.model)
        before, generate = vars(model).get("generate"), model.generate

        def numbered(*, input_ids, attention_mask, **given):
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
    processors, generate = GenerationMixin._get_logits_processor, GenerationMixin.generate
    multinomial, generated = torch.multinomial, []

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


def assert_each_is_generated_once(plain, groups, divides):
    """Assert that a group's ranks generate its rows, each one once.

    Args:
        plain: What `keyed_noise` yielded on each plain rank.
        groups: The same of the ranks of each group.
        divides: Whether ranks generate apart, an equal share each, or some rows together.
    """
    for expected, ranks in zip(plain, groups, strict=True):
        together, apart = (
            [[row for shared, rows in rank if shared is is_shared for row in rows] for rank in ranks]
            for is_shared in (True, False)
        )
        assert all(rows == together[0] for rows in together)
        assert bool(together[0]) != divides
        generated = [row for rows in (together[0], *apart) for row in rows]
        assert sorted(generated) == sorted(row for _, rows in expected for row in rows)
        share = sum(-(-len(rows) // len(ranks)) for _, rows in expected)
        assert not divides or max(map(len, apart)) <= share


def letters(completions, log_extra, log_metric, **_):
    """How many different characters a completion has."""
    log_extra("length", [len(x) for x in completions])
    log_metric("longest", max(map(len, completions)))
    return [len(set(x)) / LENGTH for x in completions]


async def odd(completion_ids, number, **_):
    """How many of the tokens are odd; the column of the data set plays a part."""
    return [sum(x % 2 for x in ids) / LENGTH + n / 10 for ids, n in zip(completion_ids, number, strict=True)]


def policy(seed=0, **changes):
    model = small(seed, vocab_size=259, pad_token_id=0, **changes)
    model.generation_config.eos_token_id = ENDS
    return model


def prompts(count, seed=5, talks=False):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 14, (count,), generator=generator).tolist()
    texts = [chr(97 + i) * n for i, n in enumerate(lengths)]
    rows = [[{"role": "user", "content": x}] for x in texts] if talks else texts
    return Dataset.from_list([{"prompt": x, "number": n} for x, n in zip(rows, lengths, strict=True)])
