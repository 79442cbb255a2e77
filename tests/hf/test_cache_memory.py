"""A cache in parts: what a rank keeps of it, and what a decode step receives."""

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.core.compiler.sharding.layout import Run
from hf_integration import patch_attention
from hf_integration.generation.cache import BLOCK, Held, KeptTokens
from tests.dist.ranks import make
from tests.grids import each_then_rest
from tests.hf.generation import SECTIONS, build
from tests.launch import on_engine_ranks as on_ranks
from tests.live import Live

pytestmark = pytest.mark.usefixtures("compiled")
ROWS, HEADS, KV_HEADS, DIM, LAYERS = 2, 8, 2, 8, 2  # of llama and mistral as `build` makes them
TOKEN = LAYERS * ROWS * KV_HEADS * 2 * DIM  # numbers that all layers keep of a token of each row
ELSE = 64 * 1024  # bytes, less than of a block: what a forward may leave behind, such as programs' integers


def stored(cache):
    """Return how many numbers the tensors of a rank's cache have room for."""
    tensors = {
        x for layer in cache.layers for y in (layer, *layer.held) for x in vars(y).values() if torch.is_tensor(x)
    }
    return sum(x.untyped_storage().nbytes() // x.itemsize for x in tensors)


def shared(name, section, window=8, tokens=2048):
    """Return a SequenceParallel and a model of a family that is patched with it."""
    sp = make(size=dist.get_world_size(), **section)
    return sp, patch_attention(build(name, window, tokens), sp)


@torch.no_grad()
def call(model, count, cache=None):
    """Make a forward with a cache, and return the cache."""
    return model(torch.full((ROWS, count), 3), past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values


def rooms(section, prompt, new):
    """Return the numbers that a cache has room for after a prompt and after `new` further tokens."""
    _, model = shared("llama", section)
    cache = call(model, prompt)
    found = [stored(cache)]
    for _ in range(new):
        call(model, 1, cache)
    return *found, stored(cache)


def assert_in_parts(world, section, prompt, new):
    for found in on_ranks(world, rooms, section, prompt, new, timeout=600):
        for room, tokens in zip(found, (prompt, prompt + new), strict=True):
            assert -BLOCK <= room / TOKEN - tokens / world <= BLOCK + (tokens > prompt) * tokens / world / 4


def test_a_rank_keeps_its_part():
    assert_in_parts(2, SECTIONS[2]["u2"], 1030, 40)


# Ulysses degrees below, equal to and above the number of key/value heads
@pytest.mark.slow
@pytest.mark.parametrize(("world", "section", "new"), [(2, "zigzag", 1000), (4, "u2r2", 10), (4, "u4", 10)])
def test_a_rank_keeps_its_part_after_many_tokens(world, section, new):
    assert_in_parts(world, SECTIONS[world][section], 1030, new)


def capacities(prompt, new):
    """Return the sizes of a buffer in decode steps after a prompt, each once."""
    kept, held, found = KeptTokens(make(size=1), None), Held(), {}
    for count in (prompt, *[1] * new):
        x = torch.ones(1, count, 1, 1)
        rows = [row.with_new([[Run(0, 1, count)]], count) for row in kept.rows]
        held.store(x, x, kept, rows, [0])
        kept.rows, found[held.keys.shape[2]] = tuple(rows), None
    assert held.keys[0, 0, : prompt + new, 0].tolist() == [1.0] * (prompt + new)
    return [*found]


def test_decoded_tokens_seldom_move_a_cache():
    assert on_ranks(1, capacities, 5000, 2000) == [[5120, 6656, 8448]]


def left(section):
    """Return the bytes of tensors that are still alive after forwards, beyond those of the cache."""
    _, model = shared("llama", section)
    with Live(*model.parameters(), *model.buffers()) as live:
        cache = call(model, 1030)
        call(model, 1, call(model, 100, cache))
        return live.settled() - 4 * stored(cache)


def test_a_forward_leaves_nothing_but_its_cache():
    assert max(on_ranks(2, left, SECTIONS[2]["u2"])) < ELSE


def in_windows(section, window, calls):
    """Return the most tokens that a cache of windows has room for between calls of so many tokens."""
    _, model = shared("mistral", section, window)
    cache, most = None, 0
    for count in calls:
        cache = call(model, count, cache)
        most = max(most, stored(cache) / TOKEN)
    return most


@pytest.mark.parametrize("window", each_then_rest([40], [700]))
def test_windows_are_all_that_is_kept(window):
    """docs/generation.md says how much: the window, or a rank's part where that is less, and up to two blocks."""
    for most in on_ranks(2, in_windows, SECTIONS[2]["zigzag"], window, (1500, 200, 60, *[1] * 20)):
        assert window / 2 <= most <= min(1800 / 2, window) + 2 * BLOCK


def received(section, prompts):
    """Return the bytes that a decode step receives after each of these prompts."""
    sp, model = shared("llama", section)
    found = []
    for count in prompts:
        cache = call(model, count)
        call(model, 1, cache)
        before = sp.comm.received_bytes
        call(model, 1, cache)
        found.append(sp.comm.received_bytes - before)
    return found


@pytest.mark.parametrize("world", each_then_rest([2], [3, 4]))
def test_a_decode_step_receives_as_much_after_any_prompt(world):
    for found in on_ranks(world, received, {"ulysses": 1}, (20, 150, 1030)):
        assert {*found} == {(world - 1) * ROWS * HEADS * (DIM + 1) * 4 * LAYERS}
