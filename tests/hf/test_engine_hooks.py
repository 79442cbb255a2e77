"""Parts of ds_seqpar run around the methods of a DeepSpeed engine in the order that `hooks.ORDER` states."""

import pytest
import torch

import ds_seqpar
from ds_seqpar.deepspeed.hooks import COUNTS, FINITE, ORDER, UNUSED, WRITING, hooks_of
from ds_seqpar.engine import hook_engine
from tests.dist.ranks import make, refusal
from tests.dist.test_unused_sharding import BATCH, Model
from tests.hf.llama import settings
from tests.launch import on_engine_ranks as on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")


def engine_of(attends=True, **section):
    sp = make(**section)
    model = Model(sp if attends else None)
    config = settings({"size": sp.size, **section}, "2", 1, micro=1)
    return ds_seqpar.initialize(model=model, config=config, sequence_parallel=sp)[0]


def noted(events, part):
    def callback(method, *args, **kwargs):
        events.append(part)
        result = method(*args, **kwargs)
        events.append(f"{part} ends")
        return result

    return callback


def order_of_parts():
    """Installed from the inside out and from the outside in; one is removed, and one installed twice."""
    engine, events = engine_of(), []
    hooks = hooks_of(engine)
    assert hooks is hooks_of(engine)
    hooks.remove(UNUSED)
    hooks.remove(COUNTS)
    for part in (WRITING, FINITE, UNUSED, COUNTS):
        assert hooks.install(part, train_batch_size=noted(events, part))
        assert not hooks.install(part, train_batch_size=noted(events, "a second one"))
    engine.train_batch_size()
    inside = (UNUSED, COUNTS, WRITING, FINITE)
    assert sorted(inside, key=ORDER.index) == list(inside)
    assert events == [*inside, *(f"{part} ends" for part in reversed(inside))]
    hooks.remove(COUNTS)
    events.clear()
    engine.train_batch_size()
    assert COUNTS not in events
    assert events[:3] == [UNUSED, WRITING, FINITE]
    with pytest.raises(ValueError, match="not in tuple"):
        hooks.install("unknown", train_batch_size=noted(events, "unknown"))


def test_parts_run_in_the_stated_order_and_each_once():
    on_ranks(1, order_of_parts)


def second_install():
    engine = engine_of()
    sp, size = engine.sequence_parallel, engine.train_batch_size()
    hook_engine(engine, sp, of_loop=True)
    assert engine.train_batch_size() == size
    engine.set_train_batch_size(3 * size)
    assert engine.train_batch_size() == 3 * size
    assert engine.gradient_accumulation_steps() == sp.accumulation_steps == 3


def test_an_engine_that_is_hooked_twice_counts_once():
    on_ranks(2, second_install)


def unused_and_not_finite():
    engine = engine_of(attends=False, check_finite=True)
    sp = engine.sequence_parallel
    engine.backward(engine(**sp.shard_batches([BATCH])[0]))
    engine.optimizer.averaged_gradients[0][0].fill_(torch.nan)
    refused = refusal(engine.step)[1]
    sp.sharding.unused.is_met = True  # so that the next part is reached
    return refused, refusal(engine.step)[1]


def test_a_model_that_uses_no_shard_is_told_so_before_its_numbers_are_looked_at():
    for unused, not_finite in on_ranks(2, unused_and_not_finite):
        assert missing(unused, "no attention") == []
        assert missing(not_finite, "check_finite", "summed") == []


class Sometimes(Model):
    """With a tower that some batches do not use."""

    def __init__(self, sp):
        super().__init__(sp)
        self.tower, self.uses = torch.nn.Linear(8, 8), True

    def forward(self, **batch):
        return super().forward(**batch) + (self.tower(torch.ones(8)).sum() if self.uses else 0.0)


def norms_of_steps(stage):
    """Of steps of two micro-batches, both or one or none of which use the tower."""
    sp, found = make(), []
    torch.manual_seed(0)
    still = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    config = settings({"size": sp.size}, stage, 2, micro=1, **still)
    engine = ds_seqpar.initialize(model=Sometimes(sp), config=config, sequence_parallel=sp)[0]
    for uses in ((True, True), (False, False), (False, True), (True, False)):
        for engine.module.uses in uses:
            engine.backward(engine(**sp.shard_batches([BATCH, BATCH])[0]))
            engine.step()
        found.append(float(engine.get_global_grad_norm()))
    return found


def norms_of_stages():
    return norms_of_steps("2"), norms_of_steps("3")


def test_zero_3_takes_no_gradient_of_an_earlier_step():
    """As DeepSpeed does: it adds to what a parameter had when a step last used it."""
    for others, partitioned in on_ranks(2, norms_of_stages):
        assert others[2] == pytest.approx(others[3])
        assert others[1] < others[2] < others[0]
        assert partitioned == pytest.approx(others)
