"""Prepare a model for sequence-parallel training, and return a DeepSpeed engine.

DeepSpeed receives no mpu, so ZeRO treats every rank as a data-parallel rank. At every stage, ZeRO shards states and
averages gradients across all ranks. `ds_seqpar.data.batches` scales the loss so that the average over ranks is correct.
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
# arguments of deepspeed.initialize that affect neither groups nor samples nor gradients
PASSED_ON = ("optimizer", "model_parameters", "lr_scheduler")
DATA = ("training_data", "collate_fn")
JSON, ARGUMENTS = "DeepSpeed JSON", "arguments"  # names of the values that ranks compare
# the reason for rejecting each argument
REFUSED_ARGUMENTS = {
    "mpu": "whose groups change the gradient scale; leave it out",
    "mesh_param": f"whose groups change the gradient scale; leave it out and say {{'size': ...}} in \"{SECTION}\"",
}
# environment variables that DeepSpeed reads
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
# set by launchers; a process with none of these variables is a job of its own
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
    """Prepare a model for sequence-parallel training under DeepSpeed, in place of `deepspeed.initialize`.

    The call is collective across all ranks. A single process without a launcher, for example in a notebook, becomes a
    world of one rank.

    Args:
        model: A transformers model, possibly inside a peft model or torch.compile, whose attention will be patched. A
            model that calls `sp.attention` itself also works if its SequenceParallel is passed as `sequence_parallel`.
        config: A DeepSpeed JSON, as a path or a dict, with a `"sequence_parallel"` section. The default is
            `args.deepspeed_config`. `train_batch_size` counts sequences.
        args: The arguments of a script started by DeepSpeed's launcher.
        sequence_parallel: The SequenceParallel to train with. The default is the SequenceParallel of a patched model,
            or a new one with the section's settings.
        check_loss: Whether to check the loss, at the latest in the first forward pass with labels. A transformers
            causal language model must return the sum of token losses on shift_labels, divided by num_items_in_batch.
            Pass False if the loss differs intentionally.
        doctor: Whether to examine the job for a few seconds first. The default is the section's setting.
        **kwargs: optimizer, model_parameters and lr_scheduler are passed to deepspeed.initialize. distributed_port and
            dist_init_required have the same meaning as in deepspeed.initialize. `dist_init_required=False` declares
            that torch.distributed is already initialized. training_data is a map-style data set. DeepSpeed creates its
            dataloader, and groups receive different batches, as with `sp.loader`. collate_fn creates the batches to
            pass to `sp.shard_batches`.

    Returns:
        (engine, optimizer, dataloader, scheduler), as in deepspeed.initialize. `engine.sequence_parallel` is the
        SequenceParallel in use.

    Raises:
        ConfigError: The job would compute wrong gradients or cannot run. Possible reasons are unsupported arguments,
            pipeline modules, JSON keys in `ds_seqpar.deepspeed.config.REFUSED`, any configuration that DeepSpeed
            rejects, and problems found by the doctor.

    Examples:
        >>> engine, *_ = ds_seqpar.initialize(model=model, config="ds_config.json")
        >>> for batch in engine.sequence_parallel.shard_batches(microbatches, device=engine.device):
        ...     engine.backward(engine(**batch).loss)
        ...     engine.step()
    """
    # lists, since an iterator can be read only once
    passed = {name: list(x) if isinstance(x := kwargs[name], Iterator) else x for name in PASSED_ON if name in kwargs}
    json, error = DeepSpeedJson({}, ""), None
    try:
        json = _read_config(config, args, kwargs)
        check_arguments(model, kwargs)
        json.check_settings()
        json.check_auto()
        json.check()
    except ConfigError as reason:
        error = reason  # raised later by all ranks together, since their configurations may differ
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
    """Agree with all ranks on the model to train, and set up the model to share sequences."""
    compare = functools.partial(assert_same_training, json=json, given=given, model=model, call="initialize")
    return prepare_model(model, {} if error else json.section, sp, error, lambda: job_of(json), compare)


def _check_model(model: torch.nn.Module, sp: SequenceParallel, check_loss: bool) -> None:
    """Check the loss before DeepSpeed receives the model, and start checking gradients."""
    if (patcher := patcher_of_class(model)) is not None:
        patcher.check_function(model, sp) if check_loss else patcher.trust_loss(model)
    if _is_own(model) and sp.finite is not None:
        sp.finite.watch_gradients(model)  # must precede DeepSpeed's hooks, which sum gradients


def _is_own(model: torch.nn.Module) -> bool:
    """Return whether a model calls sp.attention itself."""
    patcher = patcher_of_class(model)
    return patcher is None or patcher.patched_with(model) is None


def _examine(model: torch.nn.Module, sp: SequenceParallel, json: DeepSpeedJson, doctor: bool | None) -> None:
    """Run the doctor if the argument or, by default, the section requests the doctor."""
    doctor = sp.config.doctor if doctor is None else bool(doctor)
    assert_ranks_agree(sp.control_world, ARGUMENTS, {"doctor": doctor}, call="initialize")
    if doctor:
        from .doctor import require_sound

        require_sound(sp, model, json.content)


def _deepspeed_engine(
    model: torch.nn.Module, sp: SequenceParallel, json: DeepSpeedJson, args: Any, passed: Mapping[str, Any]
) -> tuple:
    """Call deepspeed.initialize with the adapted JSON."""
    import deepspeed  # takes seconds to import, so imported only for training

    own_args, content = _without_config(args), json.for_deepspeed(sp.size, sp.data_size)
    returned = deepspeed.initialize(args=own_args, model=model, config=content, **passed)
    if args is not None and own_args is not None and hasattr(args, "local_rank"):
        args.local_rank = own_args.local_rank  # set as in DeepSpeed, for scripts that read local_rank later
    returned[0].sequence_parallel = sp
    sp.accumulation_steps = returned[0].gradient_accumulation_steps()
    return returned


def hook_engine(engine: Any, sp: SequenceParallel, of_loop: bool) -> None:
    """Install hooks on an engine. A second call has no effect.

    The hooks count sequences, save complete checkpoints, clear gradients after a ZeRO-3 step and, if `check_finite` is
    set, check the engine's steps.

    Args:
        of_loop: See `EngineCheckpoints`.
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
    """Check the loss in the first forward pass.

    At the first step, check that the model has used the sharded tensors.
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
    """Set an engine's dataloader to a loader that divides training_data among groups."""
    if data is not None:
        loader = engine.deepspeed_io(data, data_sampler=sp.sampler(data), collate_fn=collate)
        engine.training_dataloader = Loader(sp.sharding, loader)


def deepspeed_config(config: Config, sp: SequenceParallel) -> dict[str, Any]:
    """Return the JSON for DeepSpeed, for code that runs before `initialize` (zero.Init, HfDeepSpeedConfig).

    DeepSpeed counts a sequence once per rank, so `train_batch_size` (sequences) is multiplied by the SP size.

    Raises:
        ConfigError: The three batch settings are inconsistent, or are left to the HuggingFace Trainer.
    """
    json = DeepSpeedJson.read(config)
    _ = json.section  # raises if the section is misspelled
    json.check_auto()
    return json.for_deepspeed(sp.size, sp.data_size)


def _read_config(config: Config | None, args: argparse.Namespace | None, kwargs: dict[str, Any]) -> DeepSpeedJson:
    """Read the DeepSpeed configuration from the only argument that contains a configuration."""
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
    """Return a copy of args without deepspeed_config, which DeepSpeed would read as a second configuration."""
    args = copy.copy(args)
    if args is not None and getattr(args, "deepspeed_config", None):
        args.deepspeed_config = None
    return args


def check_arguments(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for unsupported or unknown arguments of deepspeed.initialize."""
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
    """Initialize torch.distributed and deepspeed.comm unless they are already initialized.

    A process without a launcher becomes a job with one rank.
    """
    import deepspeed

    op_lock.prepare_start()
    if not dist.is_initialized() and deepspeed.accelerator.get_accelerator().device_name() != "cpu":
        set_device()  # not set by DeepSpeed's launcher; communicators stay on the device that is current at creation
    if not dist.is_initialized() and dist_init_required is not False and not os.environ.keys() & set(LAUNCHED):
        backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.is_initialized() and (number := 0 if groups.all_ranks().size() == 1 else local_rank()) is not None:
        os.environ.setdefault("LOCAL_RANK", str(number))  # read by DeepSpeed
    if dist.is_initialized() or dist_init_required is not False:
        port = {} if distributed_port is None else {"distributed_port": distributed_port}
        try:
            deepspeed.init_distributed(**port)
        except ModuleNotFoundError as reason:  # if a variable is missing, DeepSpeed tries mpi4py
            raise launcher_error() or reason from None
        wait_at_exit()


def launcher_error() -> ConfigError | None:
    """Return an error if launcher variables that DeepSpeed reads are missing, or None."""
    missing = [name for name in NEEDED if name not in os.environ]
    if dist.is_initialized():  # an engine only reads LOCAL_RANK
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
    """Return the SequenceParallel to train with, after patching a transformers model that is not patched yet.

    The call is collective.

    Args:
        section: The `"sequence_parallel"` section.
        given: A SequenceParallel that the caller constructed.
        error: An error on this rank, which all ranks will raise.
        job: A function that returns the planner's inputs except the model. Called if the section requests a plan.
        compare: A function that compares the ranks' other inputs in a given process group, before more groups are
            created.

    Raises:
        ConfigError: The model cannot be patched on one rank, or the section's settings differ from the settings of
            `given` or of the SequenceParallel with which the model is patched. Raised on all ranks.
    """
    sp, config, patcher, job_with_model, base = None, None, patcher_if_known(model), None, unwrapped(model)
    try:
        config = SequenceParallelConfig.from_dict(section)
        sp = _given_or_patched_with(model, config, section, given)
        if patcher and job and not (sp or error) and config.asks_for_plan:
            job_with_model = patcher.job_of(base, job())
    except Exception as reason:  # a data set may raise any exception
        error = error or as_seqpar_error("reading what is to be trained failed", reason)
    _agree_on_model(model, sp is None, error, compare)
    shared_memory.unname()  # all ranks have initialized DeepSpeed and mapped the files
    if patcher:
        if sp is None:
            sp = SequenceParallel(config, heads=patcher.heads(base), job=job_with_model)
        patcher.patch_attention(model, sp)
        if job is not None:
            advise_on_memory(base, sp, lambda base: patcher.job_of(base, job()))
    assert sp is not None  # otherwise, _given_or_patched_with has raised
    return sp


def _given_or_patched_with(
    model: torch.nn.Module, config: SequenceParallelConfig, section: Mapping[str, Any], given: SequenceParallel | None
) -> SequenceParallel | None:
    """Return `given`, or the SequenceParallel with which the model is patched, or None if neither exists.

    Raises:
        ConfigError: The SequenceParallel does not match the model or the section.
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
    """Raise ConfigError for tile settings if the model calls sp.attention itself.

    The model's MLPs and head are unknown.
    """
    for name in ("mlp_tiles", "loss_tiles"):
        if (value := getattr(config, name)) != 1:
            raise ConfigError(
                f"{SECTION}.{name} is for transformers models that are patched; got {value!r} with a model of another "
                "kind, leave it out and tile in the model itself"
            )


def _agree_on_model(
    model: torch.nn.Module, to_make: bool, error: SeqParError | None, compare: Callable[[dist.ProcessGroup], None]
) -> None:
    """Agree on the model's class and on creating a SequenceParallel, and call `compare`.

    Ranks must agree before any rank creates groups.
    """
    with explaining_failure("initialize", groups.all_ranks()):  # may create a group
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
    """Raise DisagreementError on all ranks of a group unless their DeepSpeed JSON and arguments are the same.

    Args:
        group: The group of all ranks for CPU tensors.
        json: The JSON that DeepSpeed receives, or None without DeepSpeed.
        given: Optimizers, schedulers and other arguments, by their names in error messages.
        model: The model. All ranks must have the same parameter shapes and the same frozen parameters.
        call: The user's call, for error messages.
    """
    with together(group, "reading what is to be trained", JSON, call=call) as agreed:
        agreed.value = json and json.resolved
        fields = _fields({**given, "parameters": list(model.parameters())}, model)
    assert_ranks_agree(group, ARGUMENTS, fields, call=call)


def _fields(given: Mapping[str, Any], model: torch.nn.Module) -> object:
    """Return the fields of arguments that ranks compare.

    Parameters are compared by name, shape and dtype, optimizers by their groups, schedulers by their attributes, and
    functions by their defaults. Numbers and text are compared by value, and all other objects by class.
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
        if depth >= DEEPEST:  # for example, for an object that contains itself
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
    """Raise ConfigError if a setting in the section differs from the SequenceParallel's setting."""
    for name in section:
        value = getattr(config, name)
        if value not in ("auto", getattr(given.config, name)):
            raise ConfigError(
                f'the SequenceParallel of a model must be made from the same settings as the JSON\'s "{SECTION}" '
                f"section; got {name} {getattr(given.config, name)!r} there and {value!r} in the JSON"
            )
