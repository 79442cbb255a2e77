"""`generate` for a patched model. All ranks that share a sequence pass the same arguments and get the same tokens.

transformers' own generation loop runs on every rank, and ranks share the sequence in its forwards. Ranks compare
prompts and settings once before the loop, and draw the same random numbers during the loop.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.integrations import is_fsdp_managed_module

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError, InputError, as_seqpar_error
from ds_seqpar.base.fingerprint import Fields
from ds_seqpar.data.random_states import generators, torch_states
from ds_seqpar.data.value_checks import ValueChecks, fingerprint_of
from ds_seqpar.guards.agreement import ALL, all_gather_objects, assert_ranks_agree, differing
from ds_seqpar.guards.one_thread import check_thread

from ..compat import generation_config_of
from ..context import ForwardContext, entered
from ..families import patch_of
from ..inputs import MEDIA, by_row
from ..module_patch import override
from . import zero

MOST = 16_384  # default maximum number of prompt tokens that a rank computes in one forward
# names used in error messages for the compared values and the call
NAME = "arguments of generate"
CALL = (
    f"generate of a model that shares sequences (call it {ALL}, or on one alone in "
    "hf_integration.whole_sequences(model))"
)
ALONE = "generate on each rank by itself in hf_integration.whole_sequences(model)"
MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
TOKENS = ("inputs", "input_ids", "inputs_embeds")
# arguments that are not compared, because they may differ or because values derived from them are compared
UNCOMPARED = ("generation_config", "streamer", "tokenizer", "trust_remote_code")


def install(model: Any) -> None:
    """Make all ranks that share a sequence generate together, unless the model object overrides `generate`."""
    if model.can_generate():
        for method in METHODS:
            if method.__name__ not in vars(model):
                override(model, method.__name__, types.MethodType(method, model))


def _sharing(model: Any) -> SequenceParallel | None:
    """Return the SequenceParallel whose ranks generate together, or None if each rank generates alone."""
    patch = patch_of(model)
    return None if patch is None or patch.whole or patch.sp.size == 1 else patch.sp


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate with all ranks that share the sequence, like the `generate` method of the model's class.

    The call is collective across the ranks that share the sequence, or across all ranks if parameters are partitioned
    (ZeRO-3, FSDP). Inside `whole_sequences` each rank generates alone.

    Args:
        *args: Positional arguments of transformers' `generate`, the same on all ranks that share the sequence. Only a
            streamer may be passed on a single rank.
        **kwargs: Keyword arguments of transformers' `generate`, also the same on all ranks that share the sequence.

    Returns:
        The result of transformers' `generate`, the same on all ranks. A returned cache contains only this rank's part
        of the keys.

    Raises:
        ConfigError, InputError, DisagreementError: On all ranks, if the arguments differ between ranks or request an
            unsupported feature.
    """
    plain: Any = type(self).generate
    if (sp := _sharing(self)) is None:
        return plain(self, *args, **kwargs)
    check_thread()
    named = [name for name in inspect.signature(plain).parameters if name != "self"]
    given, gathered = _agreed(self, sp, {**dict(zip(named, args, strict=False)), **kwargs}, {*named})
    around = ForwardContext(mode="whole")  # transformers encodes images before the loop, and ranks divide them
    with gathered, _without_checkpointing(self), _numbers_of_first_rank(sp), entered(around):
        return plain(self, **given)


def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise ConfigError for continuous batching, including `generate_batch`, unless each rank generates alone."""
    if _sharing(self) is not None:
        raise ConfigError(f"a model that shares sequences needs generate; got continuous batching, {ALONE}")
    return type(self).init_continuous_batching(self, *args, **kwargs)


METHODS = (generate, init_continuous_batching)


def _agreed(
    model: Any, sp: SequenceParallel, given: dict[str, Any], named: set[str]
) -> tuple[dict[str, Any], contextlib.AbstractContextManager]:
    """Check that all ranks passed the same arguments to `generate`.

    Args:
        given: The arguments by name.
        named: The parameter names of transformers' `generate`.

    Returns:
        (the arguments for transformers; a context manager that keeps the parameters available).
    """
    parameters, fields, error = zero.split_parameters(model), None, None
    config: Any = None
    try:
        others = {name: x for name, x in given.items() if name not in named}
        config, _ = generation_config_of(model)(given.get("generation_config"), **others)
        patch = patch_of(model)
        inputs = (name for name, spec in patch.agreement.inputs.items() if spec.kind not in ("own", "refused"))
        taken = {*TOKENS, *named, *inputs, *(() if patch.facts.no_media else MEDIA)}
        if misuse := _misuse(given, config, taken):
            raise ConfigError(f"generate of a model that shares sequences needs {misuse}, leave it out, or {ALONE}")
        uncached = patch.facts.uncached
        if config.use_cache and uncached:
            raise ConfigError(
                f"generate of a model with {uncached} needs use_cache=False, which computes all tokens again "
                f"for each new one; got use_cache=True, say so, or {ALONE}"
            )
        _share_clock(sp, given, config)
        fields = _compared(given, config)
    except Exception as reason:  # the other ranks are waiting for this rank
        error = as_seqpar_error("reading the arguments of generate failed", reason)
    is_fsdp = is_fsdp_managed_module(model) or any(isinstance(x, FSDPModule) for x in model.modules())
    if fetches := bool(parameters) or is_fsdp:
        number = int(not parameters or not zero.fits(parameters, sp.device))
        number = assert_ranks_agree(
            sp.control_world, NAME, fields, error=error, number=number, peers=sp.groups.control,
            among_peers=True, call=CALL, advice=_advice,
        )  # fmt: skip
        given["synced_gpus"] = fetches = number > 0
        # ranks call layers that gather keys different numbers of times
        if fetches and config.use_cache and patch.facts.gathered:
            raise ConfigError(
                "generate of a model with layers that gather keys needs parameters that fit each rank at once, or "
                f"use_cache=False; got some that ranks fetch in each forward, say so, or {ALONE}"
            )
    else:
        sp.checker.check_now(NAME, fields, error=error, call=CALL, advice=_advice)
    if (chunk := _chunk(sp, given, config)) != config.prefill_chunk_size:
        _set(given, "prefill_chunk_size", chunk)
    return given, zero.parameters_of(model, parameters, gather=not fetches)


def _misuse(given: Mapping[str, Any], config: Any, taken: Collection[str]) -> str:
    """Return "NEEDED; got GIVEN" for the first unsupported argument, or "" if all arguments are supported.

    Args:
        taken: The names of the tensors that the call accepts.
    """
    mode, cache = config.get_generation_mode(given.get("assistant_model")), given.get("past_key_values")
    others = [
        name for name, x in given.items()
        if isinstance(x, Tensor) and x.dim() and name not in taken and not hasattr(config, name)
    ]  # fmt: skip
    search, own_cache = "greedy search, sampling or beam search", "the DynamicCache that it makes itself"
    wrong = {
        (search, "custom_generate"): given.get("custom_generate") is not None,
        (search, "an assistant_model"): given.get("assistant_model") is not None,
        (search, mode.replace("_", " ")): mode not in MODES,
        ("one beam beside a streamer", mode.replace("_", " ")): (
            mode in ("beam_search", "beam_sample") and given.get("streamer") is not None
        ),
        (own_cache, f"cache_implementation={config.cache_implementation!r}"): (
            config.cache_implementation not in (None, "dynamic")
        ),
        (own_cache, f"a {type(cache).__name__}"): cache is not None and type(cache) is not DynamicCache,
        (own_cache, "one with offloading"): getattr(cache, "offloading", False),
        ("no attention weights", "output_attentions"): config.output_attentions,
        ("prompts of text alone", ", ".join(others)): others,
        (
            "prompts that end in a token, from which the next one follows, as with tokenizer.padding_side = 'left'",
            "padding behind a prompt",
        ): _ends_in_padding(given, config),
    }
    return next((f"{needed}; got {got}" for (needed, got), is_wrong in wrong.items() if is_wrong), "")


def _ends_in_padding(given: Mapping[str, Any], config: Any) -> bool:
    """Return whether a prompt ends in padding, using the same test as transformers."""
    mask, ids = given.get("attention_mask"), next((given[x] for x in TOKENS if given.get(x) is not None), None)
    if mask is None and isinstance(ids, Tensor):
        specials = (() if x is None else x for x in (config.pad_token_id, config.eos_token_id))
        pad, eos = (torch.as_tensor(x).flatten().tolist() for x in specials)
        mask = ids != pad[0] if pad and pad[0] not in eos else None
    return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, -1:].all())


def _compared(given: Mapping[str, Any], config: Any) -> dict[str, object]:
    """Return the values that ranks compare before generating: settings, prompts and all other comparable arguments."""
    checks = ValueChecks()
    checks.compare({"input_ids" if name == "inputs" else name: x for name, x in given.items()})
    checks.compare(by_row(given, MEDIA))  # transformers may encode media before the first forward
    others = {
        name: _described(x) for name, x in given.items()
        if x is not None and not isinstance(x, Tensor) and name not in UNCOMPARED and not hasattr(config, name)
    }  # fmt: skip
    tokenizer = config.stop_strings and type(given.get("tokenizer")).__name__
    return {**_described(config.to_diff_dict()), **others, "tokenizer": tokenizer, **checks.fields}


def _described(x: Any, depth: int = 1) -> Any:
    """Return an argument's value, or an object's type and plain attributes, for comparison between ranks."""
    if isinstance(x, Tensor):
        return fingerprint_of(x)
    if isinstance(x, list | tuple):
        return [_described(value, depth) for value in x]
    if depth and hasattr(x, "__dict__"):
        x, depth = {"": type(x).__name__, **vars(x)}, 0
    if isinstance(x, Mapping):
        return {str(name): _described(value, depth) for name, value in x.items()}
    return x if isinstance(x, bool | int | float | str | None) else type(x).__name__


def _advice(by_rank: Mapping[int, Fields]) -> str:
    """Return the reason why ranks cannot generate together, and how to fix the arguments."""
    if {*TOKENS} & {*differing(by_rank)}:
        return f"they have other prompts: give all ranks of a sequence the same, or {ALONE}"
    return ""


def _set(given: dict[str, Any], name: str, value: object) -> None:
    """Set an argument of `generate`, in the generation config or by name.

    The argument is set by name if it was passed by name or if there is no config.
    """
    if name not in given and given.get("generation_config") is not None:
        given["generation_config"] = copy.deepcopy(given["generation_config"])
        setattr(given["generation_config"], name, value)
    else:
        given[name] = value


class _AsOne(StoppingCriteria):
    """A time limit for all ranks that share a sequence.

    All ranks stop in the step in which the first rank reaches the limit.
    """

    def __init__(self, sp: SequenceParallel, limit: MaxTimeCriteria) -> None:
        self.sp, self.limit = sp, limit

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = self.limit(input_ids, scores, **kwargs)
        late = self.sp.checker.check_now("time of a generation", None, number=int(done.any()), call=CALL)
        return torch.full_like(done, bool(late))


def _share_clock(sp: SequenceParallel, given: dict[str, Any], config: Any) -> None:
    """Make all ranks stop in the same step if `generate` has a time limit."""
    criteria = [_AsOne(sp, x) if isinstance(x, MaxTimeCriteria) else x for x in given.get("stopping_criteria") or ()]
    if config.max_time is not None:
        criteria.append(_AsOne(sp, MaxTimeCriteria(config.max_time)))
        _set(given, "max_time", math.inf)
    if criteria:
        given["stopping_criteria"] = StoppingCriteriaList(criteria)


def _chunk(sp: SequenceParallel, given: Mapping[str, Any], config: Any) -> int | None:
    """Return the number of tokens per prompt row that one forward computes, or None for all tokens."""
    chunk, length, has_media = config.prefill_chunk_size, 0, any(given.get(name) is not None for name in MEDIA)
    ids = given.get("inputs") if given.get("inputs") is not None else given.get("input_ids")
    if ids is not None and given.get("inputs_embeds") is None and config.use_cache is not False:
        rows = ids.shape[0] * max(config.num_beams or 1, config.num_return_sequences or 1)
        mask, cache = given.get("attention_mask"), given.get("past_key_values")
        kept = 0 if cache is None or (mask is not None and mask.shape[1] > ids.shape[1]) else cache.get_seq_length()
        length = ids.shape[1] - kept
        # transformers cannot chunk prompts with media
        if chunk is None and rows * length > MOST * sp.size and not has_media:
            chunk = max(1, MOST * sp.size // rows)
    return _in_step(sp, length, chunk, has_media) if given.get("synced_gpus") else chunk


def _in_step(sp: SequenceParallel, length: int, chunk: int | None, has_media: bool) -> int | None:
    """Return a chunk size with which all groups need the same number of forwards for their prompts.

    All ranks fetch parameters together in each forward, so the numbers of forwards must match. The chosen number is the
    smallest one that fits all groups' prompts.
    """
    count, most, error = -(-length // chunk) if chunk else 1, 0, None
    while True:
        agreed = assert_ranks_agree(
            sp.control_world, "forwards of a prompt", None, error=error, number=count, call=CALL
        )  # fmt: skip
        if agreed == most:
            return chunk
        if count < (most := agreed):
            if (longest := -(-length // (most - 1)) - 1) < 1 or has_media:
                got, advice = (f"{max(length, 1)} tokens", "longer") if longest < 1 else ("media", "shorter")
                error = InputError(
                    f"generate, with parameters that groups of ranks fetch from one another, needs prompts that {most} "
                    f"forwards can share; got {got} in one group, give all groups {advice} prompts"
                )
            else:
                count = -(-length // longest)
                chunk = -(-length // count)


@contextlib.contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Context manager that disables gradient checkpointing, which would discard the cache in training mode."""
    layers: list[Any] = [x for x in model.modules() if x.training and getattr(x, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


@contextlib.contextmanager
def _numbers_of_first_rank(sp: SequenceParallel) -> Iterator[None]:
    """Context manager in which all ranks that share a sequence draw the first rank's random numbers.

    On exit, ranks that started with the first rank's random state keep the advanced state, and all other ranks restore
    their own state.
    """
    own = torch_states(sp.device)
    states = all_gather_objects(sp.groups.control, ("random numbers of a generation", own))
    _, first = states[sp.groups.sp_order.index(0)]
    others = [x for x in zip(generators(sp.device), own, first, strict=True) if not x[1].equal(x[2])]
    for generator, _, state in others:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state, _ in others:
            generator.set_state(state)
