"""Prepare a model for sequence parallel training, and return a DeepSpeed engine.

DeepSpeed is given no mpu. For ZeRO every rank is a data parallel rank: at every stage it shards states and averages
gradients over all ranks. `ds_seqpar.data.batches` divides the loss so that this average is right.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .base import compat
from .base.errors import SECTION, ConfigError, SeqParError, as_seqpar_error, did_you_mean
from .base.files import DEEPEST
from .base.hosts import local_rank, set_device
from .core.runtime import groups
from .core.settings import SequenceParallelConfig
from .data.loader import Loader
from .deepspeed.config import DeepSpeedJson
from .deepspeed.counts import count_sequences
from .deepspeed.cpu_launch import op_lock, shared_memory
from .deepspeed.hooks import FINITE, KEPT, UNUSED, hooks_of
from .deepspeed.saving.engine import EngineCheckpoints
from .guards.agreement import assert_ranks_agree, together
from .guards.interfaces import gloo_meets_hosts
from .guards.process_exit import wait_at_exit
from .guards.waits import explaining_failure
from .models import patcher_if_known, patcher_of_class, required_patcher, unwrapped
from .parallel import SequenceParallel
from .planning import advise_on_memory, job_of

if TYPE_CHECKING:
    import argparse

    from .planning import Job

Config = str | Path | Mapping[str, Any]
# arguments of deepspeed.initialize that change neither groups nor samples nor gradients
PASSED_ON = ("optimizer", "model_parameters", "lr_scheduler")
DATA = ("training_data", "collate_fn")
JSON, ARGUMENTS = "DeepSpeed JSON", "arguments"  # what ranks compare, by name
# argument -> why it is refused
REFUSED_ARGUMENTS = {
    "mpu": "whose groups change the gradient scale; leave it out",
    "mesh_param": f"whose groups change the gradient scale; leave it out and say {{'size': ...}} in \"{SECTION}\"",
}
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")  # environment variables of DeepSpeed
# those of launchers; without any of them the process is a job by itself
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def initialize(
    *,
    model: torch.nn.Module,
    config: Config | None = None,
    args: argparse.Namespace | None = None,
    sequence_parallel: SequenceParallel | None = None,
    check_loss: bool = True,
    doctor: bool | None = None,
    **kwargs: Any,
) -> tuple:
    """Prepare a model for sequence parallel training under DeepSpeed, in place of `deepspeed.initialize`.

    Collective over the world. A single process without a launcher, for example in a notebook, becomes a world of one
    rank.

    Args:
        model: A transformers model, possibly inside a peft model or torch.compile; its attention is patched. Or a model
            that calls `sp.attention` itself; then pass its SequenceParallel as `sequence_parallel`.
        config: A DeepSpeed JSON's path or its dict, with a `"sequence_parallel"` section; default:
            `args.deepspeed_config`. `train_batch_size` counts sequences.
        args: The arguments of a script started by DeepSpeed's launcher.
        sequence_parallel: The SequenceParallel to train with; default: one made from the section, or the model's own.
        check_loss: Whether to check the loss, at the latest in the first forward with labels. A causal language model
            of transformers must return the sum of token losses on shift_labels, divided by num_items_in_batch. Use
            False for a loss that differs on purpose.
        doctor: Whether to examine the job for some seconds first; default: the section's setting.
        **kwargs: optimizer, model_parameters and lr_scheduler go to deepspeed.initialize; distributed_port and
            dist_init_required (False: torch.distributed is already up) mean the same as there. training_data is a
            map-style data set. Its dataloader is DeepSpeed's own, divided among groups as by `sp.loader`; collate_fn
            makes its batches, which `sp.shard_batches` takes.

    Returns:
        (engine, optimizer, dataloader, scheduler), as deepspeed.initialize does. `engine.sequence_parallel` is the
        SequenceParallel in use.

    Raises:
        ConfigError: Something would break the gradient contract: other arguments, pipeline modules, JSON keys in
            `config.deepspeed_json.REFUSED`, anything that DeepSpeed itself refuses, or a finding of the doctor.

    Examples:
        >>> engine, *_ = ds_seqpar.initialize(model=model, config="ds_config.json")
        >>> for batch in engine.sequence_parallel.shard_batches(microbatches, device=engine.device):
        ...     engine.backward(engine(**batch).loss)
        ...     engine.step()
    """
    # an iterator can be read once
    passed = {name: list(x) if isinstance(x := kwargs[name], Iterator) else x for name in PASSED_ON if name in kwargs}
    json, error = DeepSpeedJson({}, ""), None
    try:
        json = _read_config(config, args, kwargs)
        check_arguments(model, kwargs)
        json.check_settings()
        json.check_auto()
        json.check()
    except ConfigError as reason:
        error = reason  # all ranks raise it together: their configurations may differ
    start(kwargs.get("distributed_port"), kwargs.get("dist_init_required"))
    sp = _shared_model(model, json, sequence_parallel, {**passed, "check_loss": check_loss}, error or launcher_error())
    _check_model(model, sp, check_loss)
    _examine(model, sp, json, doctor)
    engine, optimizer, _, scheduler = _deepspeed_engine(model, sp, json, args, passed)
    hook_engine(engine, sp, of_loop=True)
    _check_first_step(engine, model, sp, check_loss)
    _deal_data(engine, sp, *(kwargs.get(name) for name in DATA))
    return engine, optimizer, engine.training_dataloader, scheduler


def _shared_model(
    model: torch.nn.Module, json: DeepSpeedJson, sp: SequenceParallel | None, given: dict, error: ConfigError | None
) -> SequenceParallel:
    """Agree with all ranks on the model to train, and let it share sequences."""
    compare = functools.partial(assert_same_training, json=json, given=given, model=model, call="initialize")
    return prepare_model(model, {} if error else json.section, sp, error, lambda: job_of(json), compare)


def _check_model(model: torch.nn.Module, sp: SequenceParallel, check_loss: bool) -> None:
    """Check the loss before DeepSpeed receives the model, and check gradients from now on."""
    if (patcher := patcher_of_class(model)) is not None:
        patcher.check_function(model, sp) if check_loss else patcher.trust_loss(model)
    if _is_own(model) and sp.finite is not None:
        sp.finite.watch_gradients(model)  # before DeepSpeed's hooks, which sum gradients


def _is_own(model: torch.nn.Module) -> bool:
    """Whether a model calls sp.attention itself."""
    patcher = patcher_of_class(model)
    return patcher is None or patcher.patched_with(model) is None


def _examine(model: torch.nn.Module, sp: SequenceParallel, json: DeepSpeedJson, doctor: bool | None) -> None:
    """Let the doctor examine the job if the argument, or by default the section, says so."""
    doctor = sp.config.doctor if doctor is None else bool(doctor)
    assert_ranks_agree(sp.control_world, ARGUMENTS, {"doctor": doctor}, call="initialize")
    if doctor:
        from .doctor import require_sound

        require_sound(sp, model, json.content)


def _deepspeed_engine(
    model: torch.nn.Module, sp: SequenceParallel, json: DeepSpeedJson, args: Any, passed: Mapping[str, Any]
) -> tuple:
    """Call deepspeed.initialize with the JSON that DeepSpeed needs."""
    import deepspeed  # takes seconds: only those who train wait for it

    own_args, content = _without_config(args), json.for_deepspeed(sp.size, sp.data_size)
    returned = deepspeed.initialize(args=own_args, model=model, config=content, **passed)
    if args is not None and own_args is not None and hasattr(args, "local_rank"):
        args.local_rank = own_args.local_rank  # as DeepSpeed does, for scripts that read it afterwards
    returned[0].sequence_parallel = sp
    sp.accumulation_steps = returned[0].gradient_accumulation_steps()
    return returned


def hook_engine(engine: Any, sp: SequenceParallel, of_loop: bool) -> None:
    """Let an engine count sequences, save whole checkpoints, drop gradients after a ZeRO-3 step and, if `check_finite`
    is set, check its steps. A second call does nothing. of_loop: as for `EngineCheckpoints`.
    """
    if sp.finite is not None:
        hooks_of(engine).install(FINITE, **sp.finite.around_engine(engine, sp.control_world))
    if engine.zero_optimization_partition_weights():
        hooks_of(engine).install(KEPT, step=functools.partial(_step_and_forget, engine))
    count_sequences(engine, sp)
    EngineCheckpoints(engine, sp.sharding, of_loop)


def _step_and_forget(engine: Any, step: Callable, *args: Any, **kwargs: Any) -> Any:
    is_last = engine.is_gradient_accumulation_boundary()
    result = step(*args, **kwargs)
    if is_last:
        compat.forget_gradients(engine.optimizer)
    return result


def _check_first_step(engine: Any, model: torch.nn.Module, sp: SequenceParallel, check_loss: bool) -> None:
    """Check what only training shows: the loss of the first forward, and at the first step, that the model has used the
    sharded tensors.
    """
    if check_loss and (patcher := patcher_of_class(model)) is not None:
        patcher.check_engine(engine, sp)
    if not _is_own(model):
        return
    sp.sharding.unused.begin()

    def checked(step: Callable, *args: Any, **kwargs: Any) -> Any:
        error = sp.sharding.unused.error()
        assert_ranks_agree(sp.control_world, "first step of a model", None, error=error, call="engine.step")
        hooks_of(engine).remove(UNUSED)
        return step(*args, **kwargs)

    hooks_of(engine).install(UNUSED, step=checked)


def _deal_data(engine: Any, sp: SequenceParallel, data: Any, collate: Any) -> None:
    """Give an engine the dataloader of training_data, divided among groups."""
    if data is not None:
        loader = engine.deepspeed_io(data, data_sampler=sp.sampler(data), collate_fn=collate)
        engine.training_dataloader = Loader(sp.sharding, loader)


def deepspeed_config(config: Config, sp: SequenceParallel) -> dict[str, Any]:
    """Return the JSON that DeepSpeed needs, for callers that need it before `initialize` (zero.Init,
    HfDeepSpeedConfig).

    DeepSpeed counts a sequence once per rank, so `train_batch_size` (sequences) is multiplied by the SP size.

    Raises:
        ConfigError: The three batch settings are inconsistent, or are left to the HuggingFace Trainer.
    """
    json = DeepSpeedJson.read(config)
    _ = json.section  # which raises where it is misspelt
    json.check_auto()
    return json.for_deepspeed(sp.size, sp.data_size)


def _read_config(config: Config | None, args: argparse.Namespace | None, kwargs: dict[str, Any]) -> DeepSpeedJson:
    """Read the DeepSpeed configuration from the one of several arguments that contains it."""
    given = {"config": config, "config_params": kwargs.pop("config_params", None)}
    given |= {f"args.{name}": getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise ConfigError(
            f"initialize needs one DeepSpeed configuration; got {' and '.join(given) or 'none'}, pass config= (a path "
            "or dict) or args with --deepspeed_config"
        )
    return DeepSpeedJson.read(*given.values())


def _without_config(args: argparse.Namespace | None) -> argparse.Namespace | None:
    """Copy args without deepspeed_config, which DeepSpeed would take as a second configuration."""
    args = copy.copy(args)
    if args is not None and getattr(args, "deepspeed_config", None):
        args.deepspeed_config = None
    return args


def check_arguments(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments of deepspeed.initialize that are refused or unknown here."""
    accepted = [*PASSED_ON, *DATA, "distributed_port", "dist_init_required"]
    for name, value in kwargs.items():
        if name in REFUSED_ARGUMENTS:
            if value is not None:
                raise ConfigError(f"initialize takes no {name}, {REFUSED_ARGUMENTS[name]}")
        elif name not in accepted:
            known = [*accepted, *inspect.signature(initialize).parameters]
            raise ConfigError(f"initialize takes no argument {name!r}{did_you_mean(name, known)}; leave it out")
    data, collate = (kwargs.get(name) for name in DATA)
    has_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if data is not None and (not has_index or isinstance(data, torch.utils.data.IterableDataset)):
        raise ConfigError(
            f"training_data must have a length and an index; got {type(data).__name__}, make a DataLoader of it and "
            "use sp.loader"
        )
    if collate is not None and data is None:
        raise ConfigError("collate_fn belongs to training_data; got it alone, leave it out or give both")
    if any(base.__name__ == "PipelineModule" for base in type(model).__mro__):
        raise ConfigError("initialize takes no PipelineModule; give it the plain model")


def start(distributed_port: int | None = None, dist_init_required: bool | None = None) -> None:
    """Initialize torch.distributed and deepspeed.comm, unless they already are. A process without a launcher becomes a
    job of one rank.
    """
    import deepspeed

    op_lock.prepare_start()
    if not dist.is_initialized() and deepspeed.accelerator.get_accelerator().device_name() != "cpu":
        set_device()  # DeepSpeed's launcher sets none, and communicators stay on the device that they are made on
    if not dist.is_initialized() and dist_init_required is not False and not os.environ.keys() & set(LAUNCHED):
        backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.is_initialized() and (number := 0 if groups.all_ranks().size() == 1 else local_rank()) is not None:
        os.environ.setdefault("LOCAL_RANK", str(number))  # DeepSpeed reads it there
    if dist.is_initialized() or dist_init_required is not False:
        port = {} if distributed_port is None else {"distributed_port": distributed_port}
        try:
            deepspeed.init_distributed(**port)
        except ModuleNotFoundError as reason:  # where a variable is missing, DeepSpeed asks MPI
            raise launcher_error() or reason from None
        wait_at_exit()


def launcher_error() -> ConfigError | None:
    """Return the error for ranks without the variables that launchers set and DeepSpeed reads, or None."""
    missing = [name for name in NEEDED if name not in os.environ]
    if dist.is_initialized():  # an engine reads one of these
        missing = ["LOCAL_RANK"] * (local_rank() is None)
    if not missing:
        return None
    return ConfigError(
        f"DeepSpeed needs the variables of a launcher on every rank; {', '.join(missing)} is not set, start the script "
        "with deepspeed, torchrun or accelerate launch (under srun see examples/launch/slurm.sh)"
    )


def prepare_model(
    model: torch.nn.Module,
    section: Mapping[str, Any],
    given: SequenceParallel | None = None,
    error: SeqParError | None = None,
    job: Callable[[], Job] | None = None,
    compare: Callable[[dist.ProcessGroup], None] = lambda _: None,
) -> SequenceParallel:
    """Return the SequenceParallel to train with. Patch a transformers model that is not patched yet. Collective.

    Args:
        section: The `"sequence_parallel"` section.
        given: A SequenceParallel that the caller made.
        error: An error of this rank, which all ranks then raise.
        job: Returns what the planner must know besides the model; called if the section requests a plan.
        compare: Compares the ranks' other inputs, before any group is made except the one that it receives.

    Raises:
        ConfigError: On all ranks, if on one rank the model cannot be patched, or if `given` or the SequenceParallel
            that the model is patched with has other settings than the section.
    """
    sp, config, patcher, job_with_model, base = None, None, patcher_if_known(model), None, unwrapped(model)
    try:
        config = SequenceParallelConfig.from_dict(section)
        sp = _given_or_patched_with(model, config, section, given)
        if patcher and job and not (sp or error) and config.asks_for_plan:
            job_with_model = patcher.job_of(base, job())
    except Exception as reason:  # a data set may raise anything
        error = error or as_seqpar_error("reading what is to be trained failed", reason)
    _agree_on_model(model, sp is None, error, compare)
    shared_memory.unname()  # all ranks have initialized DeepSpeed, and so mapped the files
    if patcher:
        if sp is None:
            sp = SequenceParallel(config, heads=patcher.heads(base), job=job_with_model)
        patcher.patch_attention(model, sp)
        if job is not None:
            advise_on_memory(base, sp, lambda base: patcher.job_of(base, job()))
    assert sp is not None  # otherwise _given_or_patched_with has raised
    return sp


def _given_or_patched_with(
    model: torch.nn.Module, config: SequenceParallelConfig, section: Mapping[str, Any], given: SequenceParallel | None
) -> SequenceParallel | None:
    """Return `given`, or the SequenceParallel that the model is patched with; None if one must be made. Raises
    ConfigError if it does not fit the model or the section.
    """
    sp = given
    if patcher := patcher_if_known(model) if given else required_patcher(model):
        sp = given or patcher.patched_with(model)
        patcher.check_patch(model, sp)
    else:
        _check_no_tiles(config)
    if sp is not None:
        _check_same_settings(config, section, sp)
    return sp


def _check_no_tiles(config: SequenceParallelConfig) -> None:
    """Raise ConfigError for tiles with a model that calls sp.attention itself: its MLPs and head are unknown."""
    for name in ("mlp_tiles", "loss_tiles"):
        if (value := getattr(config, name)) != 1:
            raise ConfigError(
                f"{SECTION}.{name} is for transformers models that are patched; got {value!r} with a model of another "
                "kind, leave it out and tile in the model itself"
            )


def _agree_on_model(
    model: torch.nn.Module, to_make: bool, error: SeqParError | None, compare: Callable[[dist.ProcessGroup], None]
) -> None:
    """Agree on the model's class and on whether to make groups, and call `compare`, before any rank makes or uses
    groups.
    """
    with explaining_failure("initialize", groups.all_ranks()):  # which may make a group
        world = groups.control_world(gloo_meets_hosts)
    value = {"model": type(unwrapped(model)).__name__, "sequence_parallel": "to be made" if to_make else "given"}
    try:
        assert_ranks_agree(world, "models", value, error=error, call="initialize")
        compare(world)
    finally:
        groups.free([world] if world is not groups.all_ranks() else [])


def assert_same_training(
    group: dist.ProcessGroup, *, json: DeepSpeedJson | None, given: Mapping[str, Any], model: torch.nn.Module, call: str
) -> None:
    """Raise DisagreementError on all ranks of a group unless all train with the same DeepSpeed JSON and arguments.

    Args:
        group: The group of all ranks, for CPU tensors.
        json: The JSON that DeepSpeed receives; None without DeepSpeed.
        given: Optimizers, schedulers and other arguments, by their names in errors.
        model: The model; its parameters must have the same shapes and the same frozen ones on all ranks.
        call: The user's call, for errors.
    """
    with together(group, "reading what is to be trained", JSON, call=call) as agreed:
        agreed.value = json and json.resolved
        fields = _fields({**given, "parameters": list(model.parameters())}, model)
    assert_ranks_agree(group, ARGUMENTS, fields, call=call)


def _fields(given: Mapping[str, Any], model: torch.nn.Module) -> object:
    """Return the fields of arguments that ranks compare: a parameter's name in the model, shape and dtype, an
    optimizer's groups, a scheduler's attributes, a function's defaults; for anything else except numbers and text, the
    class.
    """
    names = {
        id(p): f"{name} {compat.whole_shape(p)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }

    def fields(x: Any, depth: int) -> object:
        kind, inner = getattr(x, "__qualname__", type(x).__qualname__), functools.partial(fields, depth=depth + 1)
        if isinstance(x, torch.Tensor):
            return names.get(id(x)) or (x.item() if x.numel() == 1 and not x.is_meta else str(x.shape))
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if depth >= DEEPEST:  # as of what contains itself
            return kind
        if isinstance(x, Mapping):
            return {str(name): inner(value) for name, value in x.items()}
        if isinstance(x, list | tuple):
            return tuple(map(inner, x)) if isinstance(x, tuple) else [*map(inner, x)]
        if isinstance(x, functools.partial):
            return [inner(x.func), inner(x.args), inner(x.keywords)]
        if inspect.isfunction(x):
            return [kind, *(fields(value, DEEPEST) for value in x.__defaults__ or ())]
        if hasattr(x, "param_groups"):
            return {"class": kind, "groups": inner(list(x.param_groups))}
        if depth == 1 or isinstance(x, torch.optim.lr_scheduler.LRScheduler):
            return {"class": kind} | {
                name: inner(value) for name, value in getattr(x, "__dict__", {}).items() if name != "optimizer"
            }
        return kind

    return fields(given, 0)


def _check_same_settings(config: SequenceParallelConfig, section: Mapping[str, Any], given: SequenceParallel) -> None:
    """Raise ConfigError if a setting of the section differs from the SequenceParallel's."""
    for name in section:
        value = getattr(config, name)
        if value not in ("auto", getattr(given.config, name)):
            raise ConfigError(
                f'the SequenceParallel of a model must be made from the same settings as the JSON\'s "{SECTION}" '
                f"section; got {name} {getattr(given.config, name)!r} there and {value!r} in the JSON"
            )
