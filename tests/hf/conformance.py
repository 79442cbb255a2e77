"""Compares models that share sequences with plain ones: loss, logits and all gradients, in batches of each kind.

`outcomes` says of models that may fail what happened. `assert_cases` asserts that models agree with the plain ones, in
any settings, batch, way to call them, wrapper, ZeRO stage and precision. To add such a case, add a `Case` to CASES of
test_conformance.py; what it names is in `families.batch_of`, in WAYS and in WRAPPERS here.
"""

import copy
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ds_seqpar
from ds_seqpar.base.errors import ConfigError, InputError
from hf_integration import patch_attention, unpatch_attention
from hf_integration.look.in_fp64 import fp64
from tests.dist.ranks import make
from tests.hf.every_type import BY_PADDING, tiny
from tests.hf.families import EXPERTS, batch_of, collated, real
from tests.hf.in_fp64 import limit_beside, throughout
from tests.hf.llama import IGNORE, RATE, array, norm, settings, weights
from tests.launch import on_ranks

KINDS = ("plain", "right", "left", "packed")
CALLS = ("whole", "sharded")
SECTIONS = {2: {"size": 2, "ulysses": 1}, 4: {"size": 4, "ulysses": 2}}
EXACT, LIMITS = "exact", {torch.float32: 1e-5, torch.float64: 1e-10}
PATIENCE = 20  # seconds that a rank waits for another


def outcomes(types, world=2, kinds=KINDS, patch=patch_attention, build=tiny, section=None, calls=CALLS):
    """Compare each of these types, shared by `world` ranks, with the plain model in one process.

    Models in fp64 compute all in it, and must agree to 1e-9. Others must agree to 1e-5, or to twice of what the plain
    model itself differs from one in fp64.

    Args:
        types: Names of models.
        world: How many ranks share each sequence.
        kinds: Of batches.
        patch: `patch(model, sp)`, which makes a model share sequences.
        build: `build(name)`, which makes a model.
        section: The settings, if not those of `SECTIONS`.
        calls: What each kind of batch is called with.

    Returns:
        {type: {(kind, call): outcome}}. An outcome is "exact", "refused: SENTENCE" (on every rank), "wrong: ...",
        "crash: ...", "hang", or "plain: ERROR" where the plain model fails.
    """
    types, cases, section = list(types), [*itertools.product(kinds, calls)], section or SECTIONS[world]
    given, options = (types, kinds, patch, build, section, calls), (world, kinds, patch, build, section, calls)
    ranks = on_ranks(world, _tried, *given, timeout=40 + 8 * len(types), patience=PATIENCE, check=False)
    if any(isinstance(rank, tuple) for rank in ranks):  # ended without a result: nobody knows at which type
        if len(types) == 1:
            return {types[0]: dict.fromkeys(cases, f"hang: {ranks[0][1]}")}
        return {name: outcomes([name], *options)[name] for name in types}
    done = types[: min(map(len, ranks))]
    found = {name: {case: _merged([rank[name][case] for rank in ranks]) for case in cases} for name in done}
    rest = types[len(done) :]
    return found | (outcomes(rest, *options) if rest else {})


def _merged(outcomes):
    """Return what the outcomes of the ranks say together."""
    words = [outcome.partition(":")[0] for outcome in outcomes]
    for worst in ("crash", "hang"):  # a rank hangs where another crashed
        if worst in words:
            return outcomes[words.index(worst)]
    if len({*words}) > 1:
        return "wrong: " + "; ".join(f"rank {rank} {outcome}" for rank, outcome in enumerate(outcomes))
    return outcomes[0]


def _tried(types, kinds, patch, build, section, calls):
    """On a rank: the outcomes of types up to the first that crashed, which may leave messages on their way."""
    sp, found = make(**section), {}
    for name in types:
        found[name] = dict(_cases(sp, name, kinds, patch, build, calls))
        if any(outcome.startswith(("crash", "hang")) for outcome in found[name].values()):
            break
    return found


def _cases(sp, name, kinds, patch, build, calls):
    cases, broken = [*itertools.product(kinds, calls)], None
    model = build(name)
    shared = copy.deepcopy(model)
    if (error := _error(patch, shared, sp)) is not None:
        yield from ((case, error) for case in cases)
        return
    mine = {kind: _outcome(plain, model, kind) for kind in kinds[sp.rank :: sp.size]}
    expected = [None] * sp.size
    dist.all_gather_object(expected, mine)
    expected = {kind: outcome for each in expected for kind, outcome in each.items()}
    for kind, call in cases:
        error, wanted = expected[kind]
        if error is not None:
            yield (kind, call), "plain: " + error.partition(": ")[2]
        elif broken is not None:
            yield (kind, call), broken
        else:
            error, found = _outcome(CALL[call], shared, sp, kind)
            broken = error if error is not None and error.startswith(("crash", "hang")) else None
            yield (kind, call), error or compared(found, wanted, model, kind)


def _error(function, *args):
    return _outcome(function, *args)[0]


def _outcome(function, *args):
    """Return (None, what a function returned), or (the outcome that its error is, None)."""
    try:
        return None, function(*args)
    except (ConfigError, InputError) as error:
        return f"refused: {error}", None
    except Exception as error:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        line = " ".join(str(error).split())[:300]
        return f"{'hang' if 'imed out' in line else 'crash'}: {type(error).__name__}: {line} ({place})", None


def plain(model, kind):
    """Return ([logits of real tokens], [loss], gradients) of the plain model."""
    return plain_run(model, WAYS["whole"], batches_of(Case(None, batch=kind)))


def called(call, model, sp, kind):
    """Return the same of a model that shares sequences, called with a whole batch or a sharded one."""
    return shared_run(model, sp, WAYS[call], batches_of(Case(None, batch=kind)))


CALL = {call: functools.partial(called, call) for call in CALLS}


def compared(found, wanted, model, kind):
    """Return "exact", or what is wrong on this rank of what `CALL` and `plain` have given."""

    def truth():
        return _outcome(plain, fp64(copy.deepcopy(model)), kind)[1]

    wrong = beyond(found, wanted, model.dtype, truth, times=2)
    return "wrong: " + ", ".join(f"{name} by {error:.0e}" for name, (error, _) in wrong.items()) if wrong else EXACT


def plain_outputs(model, batch):
    """Return (loss, logits of real tokens) of the plain model.

    Of packs, each document by itself; where the plain model counts blocks from padding on, each row without it.
    """
    _balance(model, batch)
    by_padding = _counts_padding(model, batch)
    if "position_ids" not in batch and not by_padding:
        output = model(**padded(model, batch), use_cache=False)
        return output.loss, output.logits * real(batch)
    positions = batch.get("position_ids", batch["input_ids"]).expand_as(batch["input_ids"])
    losses, rows, number, routed = [], [], 0, []
    for row, ids in enumerate(batch["input_ids"]):
        first = int((batch["attention_mask"][row] == 0).sum()) if by_padding else 0
        ends = [] if by_padding else (positions[row] == 0).nonzero()[1:, 0].tolist()
        cut, logits = ids[first:].tensor_split(ends), []
        for document, labels in zip(cut, batch["labels"][row, first:].tensor_split(ends), strict=True):
            output = model(input_ids=document[None], use_cache=False)
            logits.append(output.logits[0])
            losses.append(F.cross_entropy(logits[-1][:-1].float(), labels[1:], reduction="sum", ignore_index=IGNORE))
            number += int((labels[1:] != IGNORE).sum())
            routed.append(output.get("router_logits"))
        rows.append(F.pad(torch.cat(logits), (0, 0, first, 0)))
    loss = sum(losses) / number
    if routed[0] is not None:
        balance = sys.modules[type(model).__module__].load_balancing_loss_func
        together = tuple(map(torch.cat, zip(*routed, strict=True)))
        loss = loss + model.router_aux_loss_coef * balance(together, model.num_experts, model.num_experts_per_tok)
    return loss, torch.stack(rows)


def whole_outputs(model, sp, batch):
    _balance(unwrapped(model), batch)
    output = model(**padded(unwrapped(model), batch), use_cache=False)
    return output.loss, output.logits * real(batch)


def sharded_outputs(model, sp, batch, shard):
    """Return (the loss of this rank's tokens, whole logits, if there are any)."""
    _balance(unwrapped(model), batch)
    output = model(**shard)
    if output.logits is None:  # the loss is in tiles
        return output.loss, None
    return output.loss, sp.gather(output.logits.detach(), 1, shard.get("placement")) * real(batch)


def _whole(logits):
    return logits.whole().detach() if hasattr(logits, "whole") else logits.detach()


def padded(model, batch):
    """Return the batch with the model's own token in the place of padding, which some positions are counted by."""
    if "attention_mask" not in batch:
        return batch
    token = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None) or 0
    return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, token)}


def _counts_padding(model, batch):
    mask = batch.get("attention_mask")
    return mask is not None and not mask[:, 0].all() and model.config.model_type in BY_PADDING


def _balance(model, batch):
    """Leave the balance of experts out for packs, but of tested families: it is none of documents by themselves."""
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "output_router_logits"):
        by_document = "position_ids" in batch and config.model_type not in EXPERTS
        config.output_router_logits = not by_document and not _counts_padding(model, batch)


def _gradients(model, world=1):
    """Return the mean over ranks of each parameter's gradient, 0 where it has none, in one message."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([getattr(grad, "full_tensor", lambda grad=grad: grad)().flatten() for grad in grads])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    if world > 1:
        dist.all_reduce(flat)
    parts = (flat / world).split([p.numel() for p in parameters])
    return {name: array(part) for name, part in zip(names, parts, strict=True)}


# --- cases that must agree


@dataclasses.dataclass(frozen=True)
class Case:
    """One model that shares sequences, and what is around it."""

    model: Callable  # () -> a plain model
    section: dict = dataclasses.field(default_factory=dict)  # settings of the SequenceParallel
    batch: Any = "packed"  # a kind of `families.batch_of`, or (number of the batch) -> a batch
    ways: tuple = ("sharded",)  # of WAYS, in turn
    prepared: Callable = lambda model: model  # (model) -> the model, before it is shared
    wrapper: str = ""  # of WRAPPERS, or "ZeRO-" and the stage
    steps: int = 1  # micro-batches
    autocast: bool = False
    limit: float | None = None  # of errors, where code casts to fp32 whatever it is in


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to call a model: each returns (loss, numbers that are compared beside gradients, or None)."""

    plain: Callable  # (model, batch)
    shared: Callable  # (model, sp, batch, this rank's part of it where it is sharded)
    is_sharded: bool = False


WAYS = {
    "sharded": Way(plain_outputs, sharded_outputs, is_sharded=True),
    "whole": Way(plain_outputs, lambda model, sp, batch, part: whole_outputs(model, sp, batch)),
}


def way(name, is_sharded=False):
    """Decorate (model, batch) -> the loss of a plain model, and of one that shares sequences."""

    def decorate(function):
        def shared(model, sp, batch, part):
            return function(model, part if is_sharded else batch), None

        WAYS[name] = Way(lambda model, batch: (function(model, batch), None), shared, is_sharded)
        return function

    return decorate


@way("its loss, sharded", is_sharded=True)
@way("its loss")
def its_loss(model, batch):
    return model(**batch)["loss"]


def in_fsdp2(model):
    stack = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    return fully_shard([fully_shard(layer) for layer in stack.layers] and model)


def with_compiled_layers(model, backend="eager"):
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


WRAPPERS = {
    "": lambda model: model,
    "DDP": DistributedDataParallel,
    "DDP, unused parameters": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "DDP, static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "FSDP2": in_fsdp2,
    "compiled layers": with_compiled_layers,
    "compiled layers, aot_eager": lambda model: with_compiled_layers(model, "aot_eager"),
    "compiled": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
}


def unwrapped(model):
    """Return the model inside of an engine, of DDP or of a compiled one."""
    return getattr(model, "module", None) or getattr(model, "_orig_mod", None) or model


def assert_cases(cases):
    """Assert on a rank that the models of cases, by name, give the plain models' losses, numbers and gradients."""
    sps, wanted = {}, plain_runs(cases)
    for name, case in cases.items():
        model, sp = shared_by(case, sps)
        for number, each in enumerate(case.ways):
            way, batches = WAYS[each], batches_of(case)
            found = shared_run(model, sp, way, batches, case.autocast, number == len(case.ways) - 1)
            dtype = torch.bfloat16 if case.autocast else next(unwrapped(model).parameters()).dtype
            exact = functools.partial(plain_in_fp64, case.model, way, batches)
            wrong = beyond(found, wanted[name, each], dtype, exact, floor=1e-3, limit=case.limit)
            assert wrong == {}, (name, each, wrong)
        if not case.wrapper:
            unpatch_attention(model)


def plain_runs(cases):
    """Return {(name of a case, way): what the plain model gives}: each rank runs its part, and each run once."""
    keys, runs = {}, {}
    for name, case in cases.items():
        for each in case.ways:
            key = case.model, str(case.batch), WAYS[each].plain, case.steps, case.section.get("size"), case.autocast
            keys[name, each] = key
            runs.setdefault(key, (case.model, WAYS[each], batches_of(case), case.autocast))
    world, all_runs = dist.get_world_size(), [None] * dist.get_world_size()
    mine = [plain_run(build(), *given) for build, *given in [*runs.values()][dist.get_rank() :: world]]
    dist.all_gather_object(all_runs, mine)
    found = {key: all_runs[index % world][index // world] for index, key in enumerate(runs)}
    return {name: found[key] for name, key in keys.items()}


def plain_in_fp64(build, way, batches):
    return plain_run(fp64(build()), way, batches)


def batches_of(case):
    """Return [(a batch as collators make it, the same whose labels cross documents)] of all groups and steps."""
    number = case.steps * dist.get_world_size() // case.section.get("size", dist.get_world_size())
    if not isinstance(case.batch, str):
        return [(case.batch(index),) * 2 for index in range(number)]
    return [(collated(case.batch, index), batch_of(case.batch, index)) for index in range(number)]


def shared_by(case, sps):
    """Return (what is called, its SequenceParallel). sps: those that other cases have made."""
    section = {"size": dist.get_world_size(), **case.section}
    model = case.prepared(case.model())
    if case.wrapper.startswith("ZeRO-"):
        stage = case.wrapper.removeprefix("ZeRO-")
        config = settings(section, stage, case.steps, len(batches_of(case)[0][0]["input_ids"]))
        if stage.startswith("3"):
            whole = {"stage3_param_persistence_threshold": 0}  # or parameters are kept whole
            config["zero_optimization"] = config["zero_optimization"] | whole
        engine, *_ = ds_seqpar.initialize(model=model, config=config)
        return engine, engine.sequence_parallel
    key = json.dumps(section, sort_keys=True)
    sp = sps[key] if key in sps else sps.setdefault(key, make(**section))
    return WRAPPERS[case.wrapper](patch_attention(model, sp)), sp


@throughout
def plain_run(model, way, batches, autocast=False):
    """Return (numbers and losses of the batches, gradients of the mean) of the plain model.

    The mean over tokens of all batches, where a way shards them; that of their losses, where it does not.
    """
    model.zero_grad()
    batches = [batch for batch, _ in batches]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses, numbers = zip(*[way.plain(model, batch) for batch in batches], strict=True)
    counts = [int((batch["labels"][:, 1:] != IGNORE).sum()) if way.is_sharded else 1 for batch in batches]
    mean = sum(loss * (count / sum(counts)) for loss, count in zip(losses, counts, strict=True))
    mean.backward()
    losses = [mean] if way.is_sharded else losses
    return [*map(numpy_of, numbers)], [loss.item() for loss in losses], _gradients(model)


@throughout
def shared_run(model, sp, way, batches, autocast=False, is_last=False):
    """Return the same of a model that shares sequences, of this rank's batches, and None for those of other groups.

    is_last: an engine takes a step so large that it leaves the gradient as the difference of weights. Other steps leave
    the weights.
    """
    inner, engine = unwrapped(model), model if isinstance(model, DeepSpeedEngine) else None
    steps = len(batches) * sp.size // dist.get_world_size()
    first = sp.data_rank * steps
    mine = batches[first : first + steps]
    parts = sp.shard_batches([padded(inner, raw) for _, raw in mine]) if way.is_sharded else mine
    losses, numbers, full = [], [], {}
    if engine is None:
        inner.zero_grad()
    else:
        before = weights(inner)
        for group in engine.optimizer.param_groups:
            group["lr"] = RATE if is_last else 0.0
    for number, ((batch, _), part) in enumerate(zip(mine, parts, strict=True), start=1):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, its = way.shared(model, sp, batch, part)
        losses.append(loss), numbers.append(numpy_of(its))
        if engine is None:
            (loss / steps).backward()
        else:
            engine.backward(loss)
            if number == steps and not is_last:
                full = {name: safe_get_full_grad(p) for name, p in inner.named_parameters()}
            engine.step()
    if engine is None:
        gradients = _gradients(inner, dist.get_world_size())
    elif is_last:
        gradients = {name: (before[name] - x).ravel() / RATE for name, x in weights(inner).items()}
        if (reported := engine.get_global_grad_norm()) is not None:
            assert abs(float(reported) / norm(gradients) - 1) < 1e-5, (float(reported), norm(gradients))
    else:
        gradients = {name: (0 * before[name] if x is None else array(x)).ravel() for name, x in full.items()}
    of_others = [None] * first
    losses = [sp.mean_loss(losses)] if way.is_sharded else [*of_others, *(loss.item() for loss in losses)]
    return [*of_others, *numbers], losses, gradients


def numpy_of(x):
    return None if x is None else array(_whole(x))


def beyond(found, wanted, dtype, exact, floor=0.01, times=6, limit=None):
    """Return {what: (error, limit)} of what is further from the plain model than rounding explains.

    Args:
        found: ([numbers], [losses], gradients) of a model that shares sequences.
        wanted: The same of the plain model.
        dtype: In which both compute.
        exact: () -> the same of the plain model in fp64, or None; called if it is needed.
        floor: A gradient is measured by its own greatest number, or by this part of all gradients' greatest where that
            is more: those of the biases of keys are 0 but for rounding.
        times: How many times the plain model's own error is allowed in fp32.
        limit: The greatest error, if not that of LIMITS.
    """
    errors = differences(found, wanted, floor)
    limits = dict.fromkeys(errors, limit or LIMITS.get(dtype, 0.0))
    is_near = all(error < limits[name] for name, error in errors.items())
    if dtype != torch.float64 and not is_near and (truth := exact()) is not None:
        own, errors = differences(wanted, truth, floor), differences(found, truth, floor)
        if dtype == torch.float32:
            limits = {name: limit_beside(error, times=times) for name, error in own.items()}
        else:
            assert max(own.values()) < 0.05, own
            limits = {name: 2 * error + 0.005 * (name == "loss") for name, error in own.items()}  # whose own may be 0
    return {name: (error, limits[name]) for name, error in errors.items() if not error < limits[name]}


def differences(found, wanted, floor):
    """Return the greatest errors of numbers, losses and gradients, beside the greatest number of each."""
    logits = [np.abs(a - b).max() / np.abs(b).max() for a, b in _pairs(found[0], wanted[0])]
    losses = [abs(a - b) / max(abs(b), 1) for a, b in _pairs(found[1], wanted[1])]
    least = floor * max(np.abs(x).max() for x in wanted[2].values())
    gradients = [np.abs(found[2][name] - x).max() / max(np.abs(x).max(), least) for name, x in wanted[2].items()]
    return {"loss": max(losses), "logits": max(logits, default=0.0), "gradients": float(np.max(gradients))}


def _pairs(found, wanted):
    return [(a, b) for a, b in zip(found, wanted, strict=False) if a is not None and b is not None]
