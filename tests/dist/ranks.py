"""What the tests of this folder do on a rank, and how they read refusals."""

import re

import torch
import torch.distributed as dist

from ds_seqpar import SeqParError, SequenceParallel, SequenceParallelConfig
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.runtime.transport import TorchComm
from tests import oracle
from tests.words import missing

SECONDS = 60  # for ranks that should be told of a mistake: one that takes longer hangs
WRONG = 1  # the rank that is given something else than the others


def make(heads=None, **config):
    """SequenceParallel from config fields."""
    return SequenceParallel(SequenceParallelConfig(**config), heads=heads)


def leaves(sp, *whole):
    """This rank's tokens of global (batch, seq, ...) tensors, as leaves that want gradients."""
    return [sp.shard(x, 1).requires_grad_() for x in whole]


def attend(sp, q, k, v, do, placement=None, way=None, **options):
    """Global (out, dq, dk, dv) from global inputs, each rank working on its own tokens. placement: of a batch; its
    shards are given too. way: what is called in place of `sp.attention`, with these options."""
    local = [sp.shard(x, 1, placement).requires_grad_() for x in (q, k, v)]
    out = (way or sp.attention)(*local, **options, **({"shards": placement.shards} if placement else {}))
    out.backward(sp.shard(do, 1, placement))
    return gather_all(sp, out, *(x.grad for x in local), placement=placement)


def assert_exact(sp, whole, placement=None, way=None, least=0.0, **options):
    """`attend` gives what dense attention does. options: causal, scale, mask."""
    found = attend(sp, *whole, placement=placement, way=way, **options)
    oracle.assert_exact(found, oracle.dense(*whole, **options), options, least=least)


def gather_all(sp, *tensors, placement=None):
    """Global tensors of these local (batch, tokens, heads, head_dim) ones, which may differ in heads: in one message,
    since messages are what takes time where ranks share cores."""
    joined = torch.cat([x.detach() for x in tensors], dim=2)
    return sp.gather(joined, 1, placement).split([x.shape[2] for x in tensors], dim=2)


def attention_error(sp, heads=(4, 2)):
    """The error of a small attention on this SequenceParallel, gradients too."""
    whole = oracle.tensors(1, sp.multiple * -(-16 // sp.multiple), heads, seed=sp.data_rank)
    return max(oracle.errors(attend(sp, *whole), oracle.dense(*whole)))


def planned(sp, seq, heads, units, batch=1, dim=8):
    """Elements that the plans of causal attention on fp64 let this rank receive, in both directions. heads: of the
    whole; units: by direction, elements of one block of each kind."""
    ulysses_size, compiler = sp.config.ulysses, sp.runtime.compiler
    inner = heads[0] // ulysses_size, max(1, heads[1] // ulysses_size), dim
    shape = shape_of(sp.config.comm_dtype, "float64", batch, inner)
    pattern = compiler.block_mask(CAUSAL, sp.runtime.shards(seq // compiler.recipe.size))
    plans = [compiler.recipe.plan(direction, pattern, shape) for direction in units]
    return [plan.received(units[plan.direction])[sp.runtime.rank] for plan in plans]


def refusal(function, *args, **kwargs):
    """(kind, message) of the SeqParError that a call raises on this rank; (None, None) where it raises none."""
    try:
        function(*args, **kwargs)
    except SeqParError as error:
        return type(error).__name__, str(error)
    return None, None


def lacking(refused, kind, *words):
    """What a `refusal` lacks of being one sentence of this kind, with these words."""
    found, message = refused
    return missing(message, *words) if found == kind and is_one_sentence(message) else [kind, "one sentence"]


def assert_all_refused(table, sp):
    """Every call of a table in turn, then a good attention: refusals must leave the ranks in step.

    table: name -> (call(sp, rank), what ranks are to be told). Nothing may arrive before a refusal.
    """
    rank, wrong = dist.get_rank(), {}
    for name, (call, expected) in table.items():
        refused = refusal(call, sp, rank)
        if lacking(refused, *expected.get(rank, expected.get("others"))) or sum(sp.comm.received.values()):
            wrong[name] = refused
        sp.accumulation_steps = None
    assert attention_error(sp) < 1e-10
    assert wrong == {}, (rank, wrong)


def is_one_sentence(message):
    return bool(message.strip()) and "\n" not in message and not re.search(r"[.!?]\s+[A-Z]", message)


def everywhere(*words, kind="InputError"):
    """Every rank is told the same."""
    return {"others": (kind, *words)}


def only_one(*words, kind="InputError"):
    """The wrong rank is told what is wrong; the others are told it too, and which rank it is."""
    return {WRONG: (kind, *words), "others": ("DisagreementError", f"rank {WRONG} cannot", *words)}


def differ(*words):
    """All ranks are told what differs, and which ranks were given what."""
    return everywhere("the same", f"rank {WRONG}: ", *words, kind="DisagreementError")


def not_refused(found, wrong):
    """Cases that were not refused by one sentence before the first step. found: name -> (kind, sentence, steps made);
    wrong: name -> (the case, words of the sentence)."""
    cases = {}
    for name, (_, words) in wrong.items():
        kind, sentence, steps = found[name]
        if not kind or not is_one_sentence(sentence) or steps or missing(sentence, *words):
            cases[name] = found[name]
    return cases


class Sent:
    def wait(self): ...


class OnDevice(TorchComm):
    """Messages that a device sends: no host waits for them. What arrives is of no use here."""

    def post(self, *messages):
        return Sent()

    all_gather = all_to_all = exchange = post

    def parts_of_all(self, x, what):
        return x.expand(2, -1)


def on_devices(**config):
    """A SequenceParallel whose ranks compare as those on accelerators do."""
    sp = make(**config)
    sp.comm.__class__ = OnDevice
    sp.checker.defers_on = "cpu"
    return sp
