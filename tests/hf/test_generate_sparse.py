"""`generate` of models whose layers gather keys, or pick them by an index: the plain model's tokens, on all ranks."""

import pytest
import torch
from torch.nn import functional

from ds_seqpar.operators import sparse
from ds_seqpar.operators.gathered import Piece
from hf_integration import gathered_past
from hf_integration.generation import cache
from tests.dist.ranks import make, refusal
from tests.hf import sparse_generation
from tests.hf.sparse_generation import CASES, EXACT, INDEXED, OWN, PICKED, STATES, conversation, model_of, prompts
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
# types -> cases that they are tried in
QUICK = {"glm_moe_dsa": ("padded",), "deepseek_v4": ("padded",)}


def check(name, cases):
    """A rank drops from its cache what no later token needs, in blocks that are shorter than the prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "BLOCK", 4)
        patch.setattr(gathered_past, "ROWS", 5)
        found = sparse_generation.outcomes((name,), cases)
    assert {*found.values()} == {EXACT}, found


@pytest.mark.parametrize("name", QUICK)
@on_each_of(2)
def test_tokens_are_those_of_the_plain_model(name):
    check(name, QUICK[name])


@on_each_of(3)
def test_a_step_picks_and_attends_as_if_one_rank_had_all_keys():
    """Rows have other numbers of keys, one rank has none of the first row, and another none of any."""
    counts, heads, width, rope, count = ((5, 0, 9), (0, 0, 3)), 16, 12, 4, 6
    runtime, generator = make(prove="never", size=3, ulysses=1).runtime.one_ring, torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, weights, queries, sinks = drawn(2, 1, heads, width), drawn(2, 1, heads), drawn(2, 1, 3, 8), drawn(3)
    matrix = drawn(3, width + rope, 8 + 5)
    rows = [(drawn(1, sum(n), width), drawn(1, sum(n), width + rope)) for n in counts]  # keys of the index, latents
    own = [n[runtime.rank] for n in counts]
    first = [sum(n[: runtime.rank]) for n in counts]

    def part(number):
        parts = [row[number][:, a : a + n] for row, a, n in zip(rows, first, own, strict=True)]
        return torch.cat([functional.pad(x, (0, 0, 0, max(own) - x.shape[1])) for x in parts])

    picks = sparse.top_kept(runtime, q, weights, part(0), own, count, 0.3)
    for given in (None, sinks):
        found = sparse.attention_to_kept(runtime, queries, part(1), matrix, picks, 0.2, given)
        for row, (keys, latent) in enumerate(rows):
            one, pieces = slice(row, row + 1), [Piece(0, 1, keys.shape[1] - 1, 0)]
            all_picks = sparse.top_keys(q[one], weights[one], keys, pieces, count, 0.3)
            expected = sparse.sparse_attention(queries[one], latent, matrix, all_picks, pieces, 0.2, given)
            torch.testing.assert_close(found[one], expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PICKED, *INDEXED, *OWN])
@on_each_of(2)
def test_so_they_are_for_every_type(name):
    check(name, [case for case in CASES if name != "roformer" or case != "padded"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dots3_note_text", "bloom", "deepseek_v4"])
@on_each_of(4)
def test_so_they_are_on_more_ranks(name):
    check(name, tuple(CASES))


@pytest.mark.slow
@on_each_of(2)
def test_what_no_cache_serves_is_refused_on_every_rank():
    sp = make(prove="never")
    for name in STATES:
        with sparse_generation.InFP64():
            shared = sparse_generation.patch_attention(model_of(name), sp)
            kind, sentence = refusal(conversation, shared, *prompts(False))
            assert (kind, "layers with a state needs use_cache=False" in sentence) == ("ConfigError", True), sentence
    with sparse_generation.InFP64():
        shared = sparse_generation.patch_attention(model_of("roformer"), sp)
        kind, sentence = refusal(conversation, shared, *prompts(True))
        assert (kind, "needs rows without padding" in sentence) == ("InputError", True), sentence
