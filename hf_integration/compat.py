"""All undocumented names from transformers, accelerate, DeepSpeed, peft, trl and torch that hf_integration uses.

`ds_seqpar.base.compat` collects more undocumented names from torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from ds_seqpar.base.compat import SEEN, attribute, mark, missing, private
from ds_seqpar.base.errors import ConfigError

from .rebinding import globals_read

# ---- transformers: models

attention_name = attribute(
    "transformers.configuration_utils:PreTrainedConfig._attn_implementation", "the attention of a local forward"
)
# the attribute that stores a config's own attention name, without its subconfigs
ATTENTION = mark("transformers.configuration_utils:_attn_implementation_internal")
# set on layers by gradient_checkpointing_enable
CHECKPOINT = mark("transformers.modeling_utils:_gradient_checkpointing_func")
checkpoint_of = attribute(
    "transformers.modeling_layers:GradientCheckpointingLayer._gradient_checkpointing_func", "a checkpointed layer"
)
# the NEFTune noise scale set on embeddings; unscaled noise would depend on the number of ranks
NEFTUNE = mark("transformers.integrations.neftune:neftune_noise_alpha")
set_output_recorders = private(
    "transformers.monkey_patching:patch_output_recorders", "a small copy of a model whose classes are patched"
)
# set on FSDP1's flat parameters and their parts
FLATTENED = mark("torch.distributed.fsdp._common_utils:_fsdp_flattened")
# each model file's "eager" attention function; without it, local forwards would raise KeyError
EAGER = mark("transformers.models.llama.modeling_llama:eager_attention_forward")


def new_model(cls: type, config: Any) -> Any:
    """Make a model with random weights and eager attention, like `from_config` but without zero.Init."""
    config._attn_implementation = "eager"
    model = cls(config)
    set_output_recorders(model)
    return model


generation_config_of = attribute(
    "transformers.generation.utils:GenerationMixin._prepare_generation_config", "`generate` of a patched model"
)

# ---- transformers and trl: the Trainer

train_batch_size = attribute("transformers.trainer:Trainer._train_batch_size", "a Trainer's count of sequences")
loss_since_log = attribute("transformers.trainer:Trainer._tr_loss", "`train_loss`")
# attributes of trl's GRPO and RLOO trainers
is_vlm = attribute("trl.trainer.grpo_trainer:GRPOTrainer._is_vlm", "GRPO and RLOO")
extra_logs = attribute("trl.trainer.grpo_trainer:GRPOTrainer._pending_extra_logs", "`log_extra` of reward functions")
extra_metrics = attribute("trl.trainer.grpo_trainer:GRPOTrainer._pending_metrics", "`log_metric` of reward functions")
# the base class of trl's trainers, which would otherwise be rejected
TRL_BASE = mark("trl.trainer.base_trainer:_BaseTrainer")
# private methods that `SequenceParallelMixin` extends, with the feature that needs each method
EXTENDED = {
    "_prepare_for_training": "Liger's kernels in a patched model",
    "_finalize_training": "`train_loss`",
    "_load_rng_state": "the random state of a resumed run",
    **dict.fromkeys(
        ("_get_output_dir", "_save", "_save_checkpoint", "_push_from_checkpoint"),
        "checkpoints that are whole or not there",
    ),
    "_get_train_sampler": 'train_sampling_strategy="batch_rebalance"',
}
# without this method, reference models would run unpatched
EXTENDED_OF_TRL = {"_precompute_ref_logps": "DPO with precompute_ref_log_probs"}
# extended methods of trl's GRPO and RLOO trainers; the methods in REBOUND call accelerate's functions
REBOUND = ("_calculate_rewards", "_generate_and_score_completions")
EXTENDED_OF_ROLLOUTS = (*REBOUND, "_generate_single_turn", "_prepare_inputs")
# each trl class's methods that call rank-counting functions through globals. `gather`, `gather_object` and `VLLMClient`
# are replaced by versions that count groups
CALLED: dict[str, dict[str, set[str]]] = {
    **{name: {} for name in ("SFTTrainer", "RewardTrainer")},
    **{name: {"_precompute_ref_logps": {"broadcast_object_list"}} for name in ("DPOTrainer", "KTOTrainer")},
    "GRPOTrainer": {REBOUND[0]: {"gather"}, REBOUND[1]: {"gather_object"}},
    "RLOOTrainer": {REBOUND[0]: {"gather"}, REBOUND[1]: {"gather", "gather_object"}},
    "VLLMGeneration": {"_init_vllm": {"VLLMClient"}, "generate": {"gather_object", "broadcast_object_list"}},
}
_COUNTS_RANKS = {"gather", "gather_object", "broadcast", "broadcast_object_list", "VLLMClient"}

EXTENDED_OF_VLLM = ("_init_vllm", "_iter_named_params")  # of trl's VLLMGeneration
# the original class would gather every rank's prompts
_GENERATION = mark("trl.trainer.grpo_trainer:VLLMGeneration")


@contextlib.contextmanager
def generation_with(mixin: type, trainer_class: type) -> Iterator[None]:
    """Context manager in which trl's trainers create their `VLLMGeneration` with the given mixin."""
    modules = {x.__module__ for x in trainer_class.__mro__} & {*sys.modules}
    scopes = [vars(sys.modules[name]) for name in modules]
    before = [(scope, scope[_GENERATION]) for scope in scopes if _GENERATION in scope]
    for scope, generation in before:
        scope[_GENERATION] = type(_GENERATION, (mixin, generation), {})
    try:
        yield
    finally:
        for scope, generation in before:
            scope[_GENERATION] = generation


def check_trainer(trainer_class: type) -> None:
    """Raise ConfigError if transformers' Trainer lacks a method that `SequenceParallelMixin` extends."""
    for name, breaks in EXTENDED.items():
        if not hasattr(trainer_class, name):
            raise missing(f"transformers.trainer:Trainer.{name}", breaks)


def check_rollouts(trainer_class: type) -> None:
    """Raise ConfigError if trl's GRPO or RLOO trainer lacks a method that `Rollouts` extends.

    Also raise ConfigError if trl's vLLM client makes rank-counting calls that `CALLED` does not list.
    """
    breaks = "what counts groups in GRPO and RLOO"
    for name in EXTENDED_OF_ROLLOUTS:
        if name not in vars(trainer_class):
            raise missing(f"{trainer_class.__module__}:{trainer_class.__name__}.{name}", breaks)
    file = sys.modules[trainer_class.__module__]
    check_calls(attribute(f"{file.__name__}:{_GENERATION}", breaks)(file))


def cuts_of_rows() -> tuple[Callable, Callable]:
    """Return trl's functions that split a processor's output into rows and join the rows again."""
    names = ("split_pixel_values_by_grid", "unsplit_pixel_values_by_grid")
    cut, join = (private(f"trl.trainer.utils:{name}", "GRPO and RLOO with images") for name in names)
    return cut, join


def check_calls(cls: type) -> None:
    """Raise ConfigError if methods of a trl class make rank-counting calls that `CALLED` does not list."""
    expected, found = CALLED[cls.__name__], dict[str, set[str]]()
    for base in cls.__mro__:
        for name, method in vars(base).items() if base.__module__.startswith("trl.") else ():
            scope = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__globals__", {})
            # including the functions' aliases in the method's file
            read = {x for x in globals_read(method) if {x, getattr(scope.get(x), "__name__", x)} & _COUNTS_RANKS}
            found.setdefault(name, read)
    for name in sorted({*expected, *found}):
        wanted, got = (", ".join(sorted(calls.get(name, ()))) or "nothing" for calls in (expected, found))
        if wanted != got:
            raise ConfigError(
                f"groups of ranks in place of processes need a {cls.__name__}.{name} that calls {wanted} by itself, as "
                f"in trl {SEEN['trl']}; got {got} in trl {importlib.metadata.version('trl')}, install one of those"
            )


_jit_manager = attribute(
    "transformers.trainer_jit_checkpoint:JITCheckpointCallback.jit_manager", "enable_jit_checkpoint=True"
)
_handler_before = attribute(
    "transformers.trainer_jit_checkpoint:CheckpointManager._original_sigterm_handler", "enable_jit_checkpoint=True"
)


def sigterm_handler_before(jit_callback: Any) -> Any:
    """Return the SIGTERM handler that transformers' callback has replaced."""
    return _handler_before(_jit_manager(jit_callback))


# ---- accelerate

_GROUPS = "an Accelerator that counts groups of ranks"
schedulers = attribute("accelerate.accelerator:Accelerator._schedulers", _GROUPS)
models = attribute("accelerate.accelerator:Accelerator._models", _GROUPS)
loaders = attribute("accelerate.accelerator:Accelerator._dataloaders", _GROUPS)
# set on prepared loaders; preparing a loader twice would give the ranks of a group different batches
PREPARED = mark("accelerate.accelerator:_is_accelerate_prepared")


@contextlib.contextmanager
def counting_processes(number: int) -> Iterator[None]:
    """Context manager that sets the number of processes that accelerate's schedulers read in each step."""
    state = PartialState()
    processes, state.num_processes = state.num_processes, number
    try:
        yield
    finally:
        state.num_processes = processes
        AcceleratorState()  # copies num_processes from PartialState


def watch_member(name: str, check: Callable[[Accelerator, FrameType, tuple], None]) -> None:
    """Run a check before each use of an Accelerator method or property.

    Args:
        name: The name of the member.
        check: Called with the Accelerator, the caller's frame and the arguments.
    """
    member = vars(Accelerator)[name]
    function: Any = member.fget if isinstance(member, property) else member

    @functools.wraps(function)
    def watched(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        check(self, sys._getframe(1), args)
        return function(self, *args, **kwargs)

    setattr(Accelerator, name, property(watched) if isinstance(member, property) else watched)


# ---- DeepSpeed

# an attribute of engines; without it, reported figures would count ranks
ENGINE = mark("deepspeed.runtime.engine:global_samples")

# set on parameters and modules by ZeRO-3, and used to detect ZeRO-3
ZERO_ID = mark("deepspeed.runtime.zero.partition_parameters:ds_id")
# set on a module whose parameters ZeRO-3 must fetch together; otherwise gradients would be reduced tile by tile
LEAF = mark("deepspeed.utils.z3_leaf_module:_z3_leaf")


def whole_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of a whole parameter; see `ds_seqpar.base.compat.whole_shape`."""
    return getattr(parameter, "ds_numel", parameter.numel())


def is_missing(parameter: Any) -> bool:
    """Return whether ZeRO-3 has not gathered a parameter."""
    return hasattr(parameter, ZERO_ID) and parameter.ds_status.name != "AVAILABLE"


def is_fetching(parameter: Any) -> bool:
    """Return whether ZeRO-3 is currently gathering a parameter."""
    return is_missing(parameter) and parameter.ds_status.name == "INFLIGHT"


def _zero_hooks(model: nn.Module) -> Iterator[tuple[dict[int, Callable], list[int]]]:
    """Yield each forward hook dict that contains ZeRO-3 hooks, along with the keys of those hooks."""
    for module in model.modules():
        for hooks in (forward_pre_hooks(module), forward_hooks(module)):
            if keys := [key for key, hook in hooks.items() if hook.__module__.startswith("deepspeed.")]:
                yield hooks, keys


def has_zero_hooks(model: nn.Module) -> bool:
    """Return whether a model's forward fetches parameters that ZeRO-3 has split."""
    return any(True for _ in _zero_hooks(model))


@contextlib.contextmanager
def without_zero_hooks(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model's forward neither gathers nor releases ZeRO-3 parameters."""
    before = [(hooks, dict(hooks)) for hooks, _ in _zero_hooks(model)]
    for hooks, keys in [*_zero_hooks(model)]:
        for key in keys:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, all_hooks in before:
            hooks.update({key: hooks.pop(key, hook) for key, hook in all_hooks.items()})  # in their original order


@contextlib.contextmanager
def outside_zero_init() -> Iterator[None]:
    """Context manager in which new modules get whole parameters, even inside `deepspeed.zero.Init`.

    The context also works in a Trainer that uses ZeRO-3, in which transformers would otherwise partition submodels.
    """
    zero, breaks = (
        sys.modules.get("deepspeed.runtime.zero.partition_parameters"),
        "a small copy of a model under ZeRO-3",
    )
    reference = private("transformers.integrations.deepspeed:_hf_deepspeed_config_weak_ref", breaks)
    settings = None if reference is None else reference()
    if zero is not None:
        private(f"{zero.__name__}:shutdown_init_context", breaks)()
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if settings is not None:
            set_hf_deepspeed_config(settings)
        if zero is not None:
            zero.restore_init_context()


# ---- peft


def is_plain_lora(module: Any) -> bool:
    """Return whether a module is peft's linear layer with plain LoRA, without dropout, magnitudes (DoRA) or biases."""
    if not hasattr(module, "lora_A") or not hasattr(module, "base_layer") or getattr(module, "lora_variant", None):
        return False
    plain = [*module.lora_A.values(), *module.lora_B.values()]
    drops = [layer for layer in module.lora_dropout.values() if module.training and getattr(layer, "p", 0.0) > 0]
    return not drops and all(type(layer) is nn.Linear and layer.bias is None for layer in plain)


# ---- torch

forward_hooks = attribute("torch.nn.modules.module:Module._forward_hooks", "attention in head chunks")
forward_pre_hooks = attribute("torch.nn.modules.module:Module._forward_pre_hooks", "attention in head chunks")


def drop_children(module: nn.Module, names: Iterable[str]) -> None:
    """Remove the named children from a shallow copy of a module, without changing the original."""
    module._modules = {name: child for name, child in module._modules.items() if name not in names}


def copy_hooks(module: nn.Module, other: nn.Module, wanted: Callable[[Callable], bool]) -> None:
    """Register the wanted forward hooks of a module on another module as well."""
    for hooks, with_kwargs, register in (
        (forward_pre_hooks(module), module._forward_pre_hooks_with_kwargs, other.register_forward_pre_hook),
        (forward_hooks(module), module._forward_hooks_with_kwargs, other.register_forward_hook),
    ):
        for key, hook in hooks.items():
            if wanted(hook):
                register(hook, with_kwargs=key in with_kwargs)


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Any]) -> Iterator[None]:
    """Context manager that removes tensor hooks.

    `torch.autograd.grad` would run the hooks for each tile, but the hooks must run only once, on the sum of all tiles'
    gradients.
    """
    before = [(tensor, tensor._backward_hooks) for tensor in tensors]
    for tensor, _ in before:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, hooks in before:
            tensor._backward_hooks = hooks


def set_dataset(loader: DataLoader, dataset: Any) -> None:
    """Replace a loader's data set, although DataLoader itself forbids the replacement."""
    vars(loader)["dataset"] = dataset
