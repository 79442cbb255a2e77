"""Inputs of the planner: the sizes of a transformers model, and the lengths of a Trainer's data."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
)

from ds_seqpar.base.errors import ConfigError, did_you_mean
from ds_seqpar.base.files import call_library, read_json, shown
from ds_seqpar.base.log import log_once
from ds_seqpar.core.compiler.schedules.base import is_count
from ds_seqpar.data.packing import PackingCollator, Packs
from ds_seqpar.deepspeed.config import DeepSpeedJson
from ds_seqpar.planner.limits import check_model

from ..compat import whole_numel
from ..look.facts import TESTED
from ..look.known import windows
from ..model.checkpointing import layers_of

if TYPE_CHECKING:
    from ds_seqpar.planner.request import Job, Model, Objective, StateLayers


IDS = "input_ids"
ROWS = 1000  # rows of a column that are read at once


def job_of(model: PreTrainedModel, job: Job) -> Job:
    """Add a model's sizes to a job of the planner.

    Args:
        model: A transformers model, on any device, whole or sharded by ZeRO-3.
        job: The job without a model.

    Returns:
        The job with the model's sizes, window and checkpointing. If the sizes cannot be counted, it has neither model
        nor length, so that nothing is planned.
    """
    try:
        sizes, window_sizes = model_sizes(model), set(windows(model))
    except ConfigError as error:
        log_once(f"sequence_parallel: nothing can be planned for this model: {error}")
        return dataclasses.replace(job, model=None, seq=None)
    return dataclasses.replace(
        job,
        model=sizes,
        window=window_sizes.pop() if len(window_sizes) == 1 else None,
        checkpointing=job.checkpointing or any(bool(layer.gradient_checkpointing) for layer in layers_of(model)),
    )


def job_of_trainer(trainer: Trainer, content: Mapping[str, Any]) -> Job:
    """Return the job of a Trainer: the values that it fills in for "auto" in the JSON, and its longest sequence.

    A sequence is a row of a batch; if a collator packs documents, it is the whole batch.
    """
    from ds_seqpar.planner.request import Job

    args, dataset, collator = trainer.args, trainer.train_dataset, trainer.data_collator
    batch_size, documents = args.per_device_train_batch_size, _longest_pack(dataset)
    seq = longest_example(dataset, args.length_column_name)
    packed = isinstance(collator, PackingCollator | DataCollatorWithFlattening)
    if packed and seq and not documents:
        documents = (seq,)
    return dataclasses.replace(
        Job.of(DeepSpeedJson.read(content)),
        seq=sum(documents) * batch_size or seq,
        documents=documents * batch_size,
        batch=1 if documents else batch_size,
        steps=args.gradient_accumulation_steps,
        sequences=None,  # the Trainer's batch depends on the number of groups, which a prediction must not change
        dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        checkpointing=bool(args.gradient_checkpointing),
        objective=objective_of(trainer),
    )


def objective_of(trainer: Trainer) -> Objective:
    """Return what a trainer of trl's computes, by its class and arguments. Prompts count for each of their rows."""
    from ds_seqpar.planner.request import TRAINERS, Objective

    args: Any = trainer.args
    names = (base.__name__ for base in trainer.__class__.__mro__ if base.__module__.startswith("trl."))
    kinds = (name.removesuffix("Trainer").lower() for name in names)
    sees_logits = args.label_smoothing_factor or trainer.compute_loss_func is not None
    known = {**TRAINERS, "sft": Objective(head="logits" if sees_logits else "fused")}
    objective = next((known[kind] for kind in kinds if kind in known), Objective())
    generates = objective.generated and not args.use_vllm
    return dataclasses.replace(
        objective,
        triton=not args.use_cpu,
        reference=getattr(trainer, "ref_model", None) is not None,
        generated=args.per_device_train_batch_size * args.steps_per_generation if generates else 0,
        completion=args.max_completion_length if generates else 0,
    )


def _longest_pack(dataset: Any) -> tuple[int, ...]:
    """Return the lengths of the documents of the longest pack, or () if the data set has no packs."""
    if not isinstance(dataset, Packs):
        return ()
    return max((tuple(dataset.lengths[document] for document in pack) for pack in dataset.packs), key=sum)


def longest_example(dataset: Any, column: str) -> int | None:
    """Return the tokens of the longest example of a `datasets.Dataset`, by its column of lengths or its input_ids.

    Returns None for any other data set, all of whose examples would have to be made.
    """
    library = sys.modules.get("datasets")  # if it is not imported, the data set is not one of its
    if library is None or not isinstance(dataset, library.Dataset) or not len(dataset):
        return None
    if column in dataset.column_names:
        return max(dataset.with_format(None)[column])  # without calling a transform of the user's
    import pyarrow.compute as arrow
    from pyarrow import types

    if IDS not in dataset.column_names:
        return None
    column_type = dataset.data.schema.field(IDS).type
    if not (types.is_list(column_type) or types.is_large_list(column_type)):
        return None
    lists = dataset.select_columns([IDS]).with_format("arrow").iter(ROWS)
    return max(arrow.max(arrow.list_value_length(rows[IDS])).as_py() for rows in lists)


WHOLE_NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "num_experts_per_tok", "moe_intermediate_size")  # fmt: skip


def numbers_of(place: str) -> Model:
    """Return the sizes of the model in `place`, a folder with a config.json, or that file.

    Raises ConfigError for anything else, and if transformers cannot make a model of it.
    """
    return _of_config(place, config_sizes)


def config_of(place: str) -> PreTrainedConfig:
    """Return the configuration of the model in `place`, as `numbers_of` finds it, and raise what it raises."""
    return _of_config(place, lambda config: config)


def random_model(place: str) -> PreTrainedModel:
    """Return a model of this configuration with random weights, for training."""
    config = config_of(place)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config)


def _of_config(place: str, read: Callable[[PreTrainedConfig], Any]) -> Any:
    if not os.path.exists(place):
        raise ConfigError(f"--model must be the folder of a model, or its config.json; there is no {place}")
    file = os.path.join(place, "config.json") if os.path.isdir(place) else place
    content = read_json(file, "--model must be the folder of a model, or its config.json; that")
    where = f"the model's configuration {file}"
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        guess = did_you_mean(str(model_type), CONFIG_MAPPING)
        raise ConfigError(f"{where}: model_type must be one that transformers knows; got {shown(model_type)}{guess}")
    return call_library("transformers", where, content, lambda fields: read(_made(where, fields)))


def _made(place: str, content: dict[str, Any]) -> PreTrainedConfig:
    config = AutoConfig.for_model(**_with_floats(content))
    for name in WHOLE_NUMBERS:
        if (value := getattr(config, name, None)) is not None and not is_count(value):
            raise ConfigError(f"{place}: {name} must be a whole number from 1; got {shown(value)}")
    return config


def _with_floats(value: Any) -> Any:
    """Return a config's JSON with the numbers for which transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    if isinstance(value, dict):
        return {name: _with_floats(x) for name, x in value.items()}
    return [_with_floats(x) for x in value] if isinstance(value, list) else value


def config_sizes(config: PreTrainedConfig) -> Model:
    """Return the sizes of a configuration's model, whose parameters are counted on the meta device.

    So the number is right for every family.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unknown(config)
    check_model(config.to_dict())
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
    return model_sizes(model)


def _unknown(config: PreTrainedConfig) -> ConfigError:
    return ConfigError(
        f"the memory of a step is known for causal language models; got a config of {config.model_type!r}, give one"
    )


def model_sizes(model: PreTrainedModel) -> Model:
    """Return the sizes of a model, on any device, whole or sharded by ZeRO-3.

    Raises ConfigError for a model without layers or head.
    """
    from ds_seqpar.planner.request import Model

    config, layers = model.config, getattr(model.base_model, "layers", None)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if layers is None or head is None:
        raise _unknown(config)
    hidden = config.hidden_size
    by_kind = _kinds_of_layers(layers, hidden)
    states = by_kind.get("states")
    heads = getattr(config, "num_attention_heads", None) or (states.heads if states else 0)
    if not heads:
        raise _unknown(config)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    width = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
    return Model(
        hidden=hidden,
        intermediate=experts * (width or getattr(config, "intermediate_size", None) or 0),
        layers=len(layers),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        # in latent attention (MLA) head_dim is that of RoPE
        head_dim=getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or hidden // heads,
        vocab=config.vocab_size,
        parameters=_elements(model),
        trained=None if all(x.requires_grad for x in model.parameters()) else _elements(model, trained=True),
        layer_parameters=max(map(_elements, layers)),
        tied=head.weight is embedding.weight,
        norms_heads=config.model_type in TESTED and TESTED[config.model_type].norms_heads,
        latent_projections=next((_elements(x) for x in layers.modules() if hasattr(x, "kv_b_proj")), None),
        **by_kind,
    )


# of kinds of layers with a state: names of their attributes, or numbers. They are a name that the kind has alone, if
# the others do not tell, then heads, heads of keys, keys, values, a head's decays, and whether there is only decay
STATES: tuple[tuple[str | int, ...], ...] = (
    ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", 1, False),
    ("qkv_dim", "num_heads", "num_heads", "head_dim", "head_dim", "head_dim", False),
    ("num_heads", "n_groups", "ssm_state_size", "head_dim", 1, True),
    ("block_size", "num_attention_heads", "num_attention_heads", "head_dim", "head_dim", 1, True),
)


def _kinds_of_layers(layers: nn.ModuleList, hidden: int) -> dict[str, Any]:
    """Return the fields of a `Model` that say which layers attend, have a state, or have an MLP; {} where all attend
    and have an MLP.

    Raises ConfigError for a layer with a convolution whose sizes are not known.
    """
    states: list[StateLayers] = []
    with_state = attending = with_mlp = 0
    for layer in layers:
        mixers = _mixers(layer)
        attention = [x for x in layer.modules() if type(x).__name__.endswith("Attention") and x not in mixers]
        states += mixers.values()
        with_state, attending = with_state + bool(mixers), attending + bool(attention)
        others = _elements(layer) - sum(map(_elements, (*mixers, *attention[:1])))
        with_mlp += others > 8 * hidden  # more than norms have
    if not states:
        return {}
    largest = max(states, key=lambda sizes: (sizes.heads * sizes.keys * sizes.values, sizes.weights))
    largest = dataclasses.replace(largest, count=with_state)
    return {"states": largest, "attention_layers": attending, "mlp_layers": with_mlp}


def _mixers(module: nn.Module) -> dict[nn.Module, StateLayers]:
    """Return the outermost modules that have a state or a convolution, with their sizes."""
    if (sizes := _state_sizes(module)) is not None:
        return {module: sizes}
    return {mixer: sizes for child in module.children() for mixer, sizes in _mixers(child).items()}


def _state_sizes(module: Any) -> StateLayers | None:
    from ds_seqpar.planner.request import StateLayers

    names = next((names for names in STATES if all(hasattr(module, x) for x in names if isinstance(x, str))), None)
    children = [*module.children()]
    convs = [x for x in children if isinstance(x, nn.Conv1d)]
    if names is None and not convs:
        return None
    # without LoRA's, under the names that they have without it
    linears = {name.removesuffix(".base_layer"): x for name, x in module.named_modules()
               if isinstance(x, nn.Linear) and "lora_" not in name}  # fmt: skip
    output = linears.get("out_proj", linears.get("o_proj"))
    if output is None or not (names or len(convs) + len(linears) == len(children)):
        raise ConfigError(
            "the planner knows attention, delta rules, Mamba-2, lightning attention and short convolutions; got layers "
            f"with {type(module).__name__}"
        )
    numbers = [getattr(module, x) if isinstance(x, str) else x for x in (names or [0] * 5 + [True])]
    heads, groups, keys, values, decays, only_decay = numbers[-6:]
    inputs = sum(x.out_features for x in linears.values() if x is not output)
    return StateLayers(
        count=1,
        heads=heads,
        keys=keys,
        values=values,
        transition=1 if only_decay else keys**2,
        exchanged=2 * (heads * values + groups * keys) + (decays + (not only_decay)) * heads,
        kept=inputs + sum(x.out_channels for x in convs) + 2 * output.in_features,
        weights=sum(x.in_features * x.out_features for x in linears.values()),
    )


def _elements(module: nn.Module, trained: bool = False) -> int:
    return sum(whole_numel(x) for x in module.parameters() if x.requires_grad or not trained)
