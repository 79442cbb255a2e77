"""A host runs ahead of its device: in a training step it never waits for the device, and for other ranks once."""

import functools
import time
from collections import Counter, defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from tests import grids
from tests.fake_cuda import NEEDS_CPU_BUILD
from tests.gpu import STEPS, TILES
from tests.stand_in import on_stand_in
from tests.stand_in.streams import TooEarly
from tests.stand_in.waits import POLLS, Host

pytestmark = NEEDS_CPU_BUILD

SEQ, HEADS, DIM = 48, 8, 8


def batch_of(number, packed):
    ids = torch.randint(3, 60, (1, SEQ), generator=torch.Generator().manual_seed(number))
    documents = {"position_ids": torch.arange(SEQ // 2).repeat(1, 2)} if packed else {}
    return {"input_ids": ids, "labels": ids.clone(), **documents}


class Layer(nn.Module):
    def __init__(self, sp):
        super().__init__()
        width = HEADS * DIM
        self.sp, self.qkv, self.out = sp, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, placement):
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, DIM)).unbind(2)
        where = {} if placement is None else {"mask": placement.mask, "shards": placement.shards}
        return x + self.out(self.sp.attention(q, k, v, **where).flatten(2))


class Own(nn.Module):
    """A model of one's own. It returns its loss."""

    def __init__(self, sp, keeps, layers):
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, HEADS * DIM), nn.ModuleList(Layer(sp) for _ in range(layers))
        self.run = (lambda layer, *args: layer(*args)) if keeps is None else functools.partial(sp.checkpoint, **keeps)

    def forward(self, input_ids, shift_labels, num_items_in_batch, placement=None, **_):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.run(layer, x, placement)
        logits = F.linear(x, self.embed.weight).flatten(0, 1)
        return F.cross_entropy(logits, shift_labels.flatten(), reduction="sum") / num_items_in_batch


def llama(sp, keeps, layers):
    """A patched model."""
    from hf_integration import patch_attention, trust_loss
    from hf_integration.families import patch_of
    from tests.hf.families import model_of

    model = model_of("llama", num_hidden_layers=layers).train()
    if keeps is not None:
        model.gradient_checkpointing_enable(keeps)
    patch_attention(model, sp)
    trust_loss(model)
    patch_of(model).agreement.loss_option_of = None
    return model


def sharded(sp, wholes):
    batches = sp.shard_batches(wholes, training=False, device=sp.device)
    return lambda step: batches[step % len(batches)]


def of_the_trainer(sp, wholes):
    from hf_integration.model.whole_calls import moved_batch

    return lambda step: moved_batch(wholes[step % len(wholes)], sp.device)


def on_the_device(sp, wholes):
    batches = [{name: x.to(sp.device) for name, x in whole.items()} for whole in wholes]
    return lambda step: batches[step % len(batches)]


def loss_of(model, **batch):
    return model(**batch).loss


def loss_of_logits(model, input_ids, labels, **batch):
    """A loss of one's own, for which the ranks gather a number for each token."""
    logits = model(input_ids=input_ids, **batch).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


# program -> what makes the model, what it is called with, and what gives its loss
PROGRAMS = {
    "a model of one's own": (Own, sharded, lambda model, **batch: model(**batch)),
    "sharded batches": (llama, sharded, loss_of),
    "the Trainer's whole batches": (llama, of_the_trainer, loss_of),
    "whole batches on the device": (llama, on_the_device, loss_of),
    "a loss of whole logits": (llama, of_the_trainer, loss_of_logits),
}


def train(program, section, keeps, steps, layers, ulysses=2, packs=(False, True)):
    """What a rank waits for in each step, after two of each batch: the first call of a signature may wait, and a
    model's first forward compares more than later ones.

    Args:
        packs: of each batch, whether it is a pack, if the host can see packs. Batches take turns.
    """
    make, batches, loss_of = PROGRAMS[program]
    if make is Own:
        section = {name: value for name, value in section.items() if name not in TILES}
    sp = SequenceParallel(SequenceParallelConfig(size=2, ulysses=ulysses, **section), heads=(HEADS, 2))
    wholes = [batch_of(number, packed and batches is not on_the_device) for number, packed in enumerate(packs)]
    with Host().watching() as host:
        model = on_device(sp, lambda: make(sp, keeps, layers))
        batch_at = batches(sp, wholes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for host.step in range(2 * len(packs) + steps):
            host.call += 1
            loss_of(model, **batch_at(host.step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    waits = [wait for wait in host.waits if wait.step >= 2 * len(packs)]
    sp.close()  # which may wait
    return waits


def on_device(sp, make):
    torch.set_default_dtype(torch.bfloat16)
    with sp.device:
        model = make()
    torch.set_default_dtype(torch.float32)
    return model


def too_much(waits):
    """Of the steps in which a host waits for its device, or more than once for other ranks: how often it waits where.

    It waits once for other ranks however many messages it waits for, if it gives the device nothing to do meanwhile.
    """
    steps = defaultdict(list)
    for wait in waits:
        steps[wait.step].append(wait)
    return {
        step: Counter((wait.kind, wait.where) for wait in found)
        for step, found in steps.items()
        if any(wait.kind == "device" for wait in found) or sum(not wait.again for wait in found) > 1
    }


PROMPT = 24


def decode(padded):
    """What a rank waits for in decode steps, after two of them: as training, the first ones may wait."""
    sp = SequenceParallel(SequenceParallelConfig(size=2), heads=(HEADS, 2))
    with Host().watching() as host, torch.no_grad():
        model = on_device(sp, lambda: llama(sp, None, 2)).eval()
        mask = torch.ones(2, PROMPT, dtype=torch.int64)
        mask[1, : 5 * padded] = 0
        mask, ids, cache = mask.to(sp.device), torch.full((2, PROMPT), 3).to(sp.device), None
        for host.step in range(6):
            host.call += 1
            output = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    waits = [wait for wait in host.waits if wait.step > 2]
    sp.close()
    return waits


def decoding():
    return {padded: decode(padded) for padded in (False, True)}


MAIN, CHECKPOINTS = list(PROGRAMS)[:3], {"use_reentrant": False}
GRID = grids.cover(
    lambda case: case["program"] != "a loss of whole logits" or not TILES.keys() & STEPS[case["of"]][0].keys(),
    program=tuple(PROGRAMS),
    of=tuple(STEPS),
    ulysses=(1, 2),
)


def few():
    cases = zip(MAIN, (2, 1, 1), (1, 2, 2), strict=True)
    return {name: train(name, TILES, CHECKPOINTS, 2, layers, ulysses, packs=[True]) for name, layers, ulysses in cases}


def fifty():
    return {name: train(name, TILES, CHECKPOINTS, 50, layers) for name, layers in zip(MAIN, (4, 1, 1), strict=True)}


def grid():
    return {str(case): train(case["program"], *STEPS[case["of"]], 2, 1, case["ulysses"]) for case in GRID}


@pytest.mark.parametrize("programs", grids.each_then_rest([few], [fifty, grid]), ids=lambda programs: programs.__name__)
def test_a_step_waits_once(programs):
    for found in on_stand_in((2, 2, programs))[0]:
        assert {name: wrong for name, waits in found.items() if (wrong := too_much(waits))} == {}


def test_a_decode_step_waits_for_no_device():
    for found in on_stand_in((2, 2, decoding))[0]:
        assert {padded: Counter(wait.where for wait in x if wait.kind == "device") for padded, x in found.items()} == {
            padded: {} for padded in found
        }


# ---- so that the tests above can fail


def current():
    return torch.cuda.current_stream()


def look(x):
    x.sum().item()


def compare(**how):
    return dist.all_reduce(torch.ones(1, device="cpu"), **how)


def poll(x):
    work = compare(async_op=True)
    for _ in range(POLLS):
        work.is_completed()


DEVICE, RANKS, AGAIN = ("device", False), ("ranks", False), ("ranks", True)
# what is done with a layer's output -> the waits that it is
PLANTED = {
    "a look": (look, [DEVICE]),
    "a look in backward": (lambda x: x.register_hook(look), [DEVICE]),
    "a copy": (lambda x: x.detach().cpu(), [DEVICE]),
    "a copy into a tensor": (lambda x: torch.empty(2, device="cpu").copy_(x.detach()), [DEVICE]),
    "a copy to the device": (lambda x: torch.ones(2, device="cpu").to(x.device), [DEVICE]),
    "an index of the host": (lambda x: x[torch.tensor([0], device="cpu")], [DEVICE]),
    "an event of this call": (lambda x: torch.cuda.current_stream().record_event().synchronize(), [DEVICE]),
    "a stream": (lambda x: torch.cuda.current_stream().synchronize(), [DEVICE]),
    "the device": (lambda x: torch.cuda.synchronize(), [DEVICE]),
    "a comparison": (lambda x: compare(), [RANKS]),
    "a comparison in backward": (lambda x: x.register_hook(lambda grad: compare()), [RANKS]),
    "comparisons at once": (lambda x: (compare(), compare()), [RANKS, AGAIN]),
    "comparisons": (lambda x: (compare(), x + 1, compare()), [RANKS, RANKS]),
    "a loop": (poll, [RANKS]),
    "a sleep": (lambda x: time.sleep(0), [RANKS]),
    "a work of the device": (lambda x: dist.all_reduce(x.detach()), []),
    "a work that is tested": (lambda x: compare(async_op=True).is_completed(), []),
    "a copy that does not block": (lambda x: torch.ones(2, device="cpu").to(x.device, non_blocking=True), []),
    "nothing": (lambda x: x + 1, []),
}


def plant():
    """The waits by what is planted; how many it takes to look at copies one call later."""
    found = {}
    with Host().watching() as host:
        layer, x = nn.Linear(2, 2, device="cuda"), torch.ones(2, device="cuda")
        for host.step, (name, (planted, _)) in enumerate(PLANTED.items()):
            host.call += 1
            hook = layer.register_forward_hook(lambda module, args, out, planted=planted: (planted(out), None)[1])
            layer(x).sum().backward()
            hook.remove()
            found[name] = [(wait.kind, wait.again) for wait in host.waits if wait.step == host.step]
        return found, look_later(host, x)


def look_later(host, x):
    counted, copies = len(host.waits), []
    for _ in range(3):
        event = torch.cuda.Event()
        before, copy = torch.cuda.current_stream().record_event(), x.to("cpu", non_blocking=True)
        event.record()
        copies.append((before, copy, event))
        host.call += 1
    (before, first, _), (_, second, event), (_, third, _) = copies
    before.synchronize()
    for read in (first.tolist, lambda: bool(first[0])):
        with pytest.raises(TooEarly):
            read()
    assert event.query()
    assert first.tolist() == second.tolist() == [0, 0]
    with pytest.raises(TooEarly):
        third.add(1)
    return len(host.waits) - counted


def test_what_is_planted_is_counted():
    ((found, later),) = on_stand_in((1, 1, plant))[0]
    assert found == {name: waits for name, (_, waits) in PLANTED.items()}
    assert later == 0
