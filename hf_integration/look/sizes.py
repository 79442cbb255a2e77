"""Determine a transformers model's sizes for the planner, from a model on any device or from a config."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ds_seqpar.base.compat import whole_shape
from ds_seqpar.base.errors import ConfigError, did_you_mean
from ds_seqpar.base.files import call_library, read_json, shown
from ds_seqpar.core.compiler.schedules.base import is_count
from ds_seqpar.planner.limits import check_model

from .. import sparse
from ..compat import whole_numel
from .facts import TESTED, config_heads, number_of, text_config

if TYPE_CHECKING:
    from ds_seqpar.planner.request import Index, Model, StateLayers, Tower


WHOLE_NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "num_experts_per_tok", "moe_intermediate_size")  # fmt: skip


def numbers_of(place: str) -> Model:
    """Return the sizes of the model in `place`, which is a config.json file or a folder that contains one.

    Raises ConfigError for any other path, or if transformers cannot make a model from the config.
    """
    return _of_config(place, config_sizes)


INDEX = re.compile(r"index(er)?_(topk|budget).*|keep_window_size")  # config settings of models that select keys


def config_of(place: str) -> PreTrainedConfig:
    """Return the model configuration in `place`. See `numbers_of` for paths and errors."""
    return _of_config(place, lambda config: config)


def random_model(place: str) -> PreTrainedModel:
    """Return a model for training that has random weights and the configuration in `place`."""
    config = config_of(place)
    config.use_cache = False
    return _maker(config)(config)


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
    """Replace objects such as {"__float__": "Infinity"}, which transformers writes into config files, with floats."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    if isinstance(value, dict):
        return {name: _with_floats(x) for name, x in value.items()}
    return [_with_floats(x) for x in value] if isinstance(value, list) else value


def config_sizes(config: PreTrainedConfig) -> Model:
    """Return the sizes of the model that a configuration describes.

    Parameters are counted on the meta device, so their number is exact for every family.
    """
    check_model(config.to_dict())
    check_model(text_config(config).to_dict())
    make = _maker(config)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make(config)
    return model_sizes(model)


def _maker(config: PreTrainedConfig) -> Callable[..., PreTrainedModel]:
    """Return the function that creates a model with a token head from a configuration."""
    makers = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
    }
    found = [auto.from_config for auto, mapping in makers.items() if type(config) in mapping]
    if not found or config.is_encoder_decoder:
        raise _uncounted(config, "it is no decoder with a head for tokens")
    return found[0]


def _uncounted(config: PreTrainedConfig, why: str) -> ConfigError:
    return ConfigError(f"what a step takes is known of decoders whose layers attend; got {config.model_type!r}: {why}")


def model_sizes(model: PreTrainedModel) -> Model:
    """Return the sizes of a model on any device, whether whole or partitioned by ZeRO-3.

    Raises ConfigError unless the model consists of a head and a stack of layers with attention or a state.
    """
    from ds_seqpar.planner.request import Model

    config, stack = text_config(model.config), _stack(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    layers, hidden = _layers_in(stack), number_of(config, "hidden_size")
    if layers is None or head is None or not isinstance(hidden, int):
        raise _uncounted(model.config, "it has no stack of layers, or no head for tokens")
    towers = [x for x in model.modules() if isinstance(x, PreTrainedModel) and not {*layers} & {*x.modules()}]
    by_kind, attention = _kinds_of_layers(layers, hidden), _attention_in(layers)
    states, others = by_kind.get("states"), {x for tower in towers for x in tower.modules()} | {*attention}
    (heads, kv_heads), state_heads = config_heads(config), states.heads if states else 0
    if not (heads or state_heads) or not (attention or states) or {*_attention_in(stack)} - others:
        raise _uncounted(model.config, "its attention is none of heads in each layer of one stack")
    experts = number_of(config, "num_experts_per_tok") or 1
    width = number_of(config, "moe_intermediate_size") if experts > 1 else None
    intermediate, matrices = _mlp(layers[-1], hidden, number_of(config, "intermediate_size"))
    if not (width or intermediate) and by_kind.get("mlp_layers", 1):
        raise _uncounted(model.config, "how wide its MLPs are is not known")
    return Model(
        hidden=hidden,
        intermediate=experts * (width or intermediate) if by_kind.get("mlp_layers", 1) else 0,
        layers=len(layers),
        heads=heads or state_heads,
        kv_heads=kv_heads or state_heads,
        # in latent attention (MLA), head_dim is the width of RoPE
        head_dim=number_of(config, "qk_head_dim") or number_of(config, "head_dim") or hidden // (heads or state_heads),
        vocab=config.vocab_size,
        parameters=_elements(model),
        trained=None if all(x.requires_grad for x in model.parameters()) else _elements(model, trained=True),
        layer_parameters=max(map(_elements, layers)),
        tied=head.weight is embedding.weight,
        norms_heads=config.model_type in TESTED and TESTED[config.model_type].norms_heads,
        latent_projections=next((_elements(x) for x in layers.modules() if hasattr(x, "kv_b_proj")), None),
        mlp_matrices=3 if experts > 1 else matrices,
        index=(index := _index(config, attention)),
        gathers=index is None and _gathers(config, attention),
        tower=_tower(model, stack, towers) if towers else None,
        **by_kind,
    )


def _stack(model: PreTrainedModel) -> nn.Module:
    return model.base_model if hasattr(model.base_model, "layers") else model.get_decoder() or model.base_model


def _layers_in(stack: nn.Module) -> nn.ModuleList | None:
    if isinstance(layers := getattr(stack, "layers", None), nn.ModuleList):
        return layers
    lists = [x for x in stack.modules() if isinstance(x, nn.ModuleList)]
    return max(lists, key=_elements, default=None)


def _attention_in(module: nn.Module) -> list[nn.Module]:
    return [x for x in module.modules() if type(x).__name__.endswith(("Attention", "MLA"))]


def _gathers(config: PreTrainedConfig, attention: Sequence[nn.Module]) -> bool:
    """Return whether attention modules select keys, or bypass transformers' attention interface."""
    codes = [inspect.unwrap(type(x).forward).__code__ for x in attention]
    is_own = bool(codes) and not any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)
    return is_own or any(INDEX.fullmatch(name) for name in vars(config))


def _index(config: PreTrainedConfig, attention: Sequence[Any]) -> Index | None:
    """Return the sizes of layers that select latents with a per-token index, or None if there are no such layers."""
    from ds_seqpar.planner.request import Index

    picking = [x for x in attention if sparse.selects(x)]
    if not picking or number_of(config, "index_kpool"):
        return None
    sizes = (number_of(config, f"index_{name}") for name in ("head_dim", "n_heads", "topk"))
    own = sum(getattr(x, "indexer", None) is not None for x in picking)
    return Index(len(picking), own, picking[0].kv_lora_rank + picking[0].qk_rope_head_dim, *sizes)


def _mlp(layer: nn.Module, hidden: int, intermediate: int | list[int] | None) -> tuple[int, int]:
    """Return (the width of a layer's MLP, the number of matrices with that width).

    Two fused gates count as two matrices.
    """
    attending = {x for module in _attention_in(layer) for x in module.parameters()}
    own = [x for name, x in layer.named_parameters() if x not in attending and "lora_" not in name]
    shapes = [shape for x in own if len(shape := whole_shape(x)) == 2 and hidden in shape]
    widths = [rows if columns == hidden else columns for rows, columns in shapes]
    given = max(intermediate) if isinstance(intermediate, list) else intermediate
    width = given or min(widths, default=0)
    return width, 2 if sum(widths) == 2 * width else 3


def _tower(model: PreTrainedModel, stack: nn.Module, towers: list[PreTrainedModel]) -> Tower | None:
    """Return a model's image tower if it has one, otherwise its largest tower.

    The parameter count includes all towers and the modules that join features with tokens.
    """
    from ds_seqpar.planner.request import Model, Tower

    wanted = getattr(model.config, "vision_config", None)
    tower = max(towers, key=lambda x: (x.config is wanted, _elements(x)))
    config, layers = tower.config, _layers_in(tower)
    hidden = number_of(config, "hidden_size")
    if layers is None or not hidden:
        return None
    heads = number_of(config, "num_attention_heads") or number_of(config, "num_heads") or 1
    width, matrices = _mlp(layers[-1], hidden, number_of(config, "intermediate_size"))
    merge, full = number_of(config, "spatial_merge_size"), number_of(config, "fullatt_block_indexes")
    image, patch = (_side(number_of(config, name)) for name in ("image_size", "patch_size"))
    of_text = {*stack.parameters(), *model.get_output_embeddings().parameters()}
    of_text -= {x for each in towers for x in each.parameters()}
    return Tower(
        layers=Model(
            hidden=hidden, intermediate=width, layers=len(layers), heads=heads, kv_heads=heads,
            head_dim=hidden // heads, vocab=0, parameters=_elements(model) - sum(map(whole_numel, of_text)),
            layer_parameters=max(map(_elements, layers)),
            mlp_matrices=matrices,
        ),
        full_layers=len(layers) if full is None else len(full),
        window=(number_of(config, "window_size") or 0) ** 2 // patch**2 if full is not None and patch else 0,
        patches_a_token=merge and merge**2,
        patches=(image // patch) ** 2 if image and patch and not merge else number_of(config, "max_source_positions"),
        tokens=number_of(model.config, "image_seq_length") or number_of(model.config, "mm_tokens_per_image"),
    )  # fmt: skip


def _side(size: Any) -> int:
    return min(size) if isinstance(size, list | tuple) else size or 0


# attribute names or numbers for each kind of layer with a state: optionally a name unique to the kind, then the number
# of heads, the number of key heads, the widths of keys and values, the number of decays per head, and whether the state
# only decays
STATES: tuple[tuple[str | int, ...], ...] = (
    ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", 1, False),
    ("qkv_dim", "num_heads", "num_heads", "head_dim", "head_dim", "head_dim", False),
    ("num_heads", "n_groups", "ssm_state_size", "head_dim", 1, True),
    ("block_size", "num_attention_heads", "num_attention_heads", "head_dim", "head_dim", 1, True),
)


def _kinds_of_layers(layers: nn.ModuleList, hidden: int) -> dict[str, Any]:
    """Return the `Model` fields that count the layers with attention, a state or an MLP.

    Returns {} if all layers have attention and an MLP. Raises ConfigError for a layer that has a convolution of unknown
    size.
    """
    states: list[StateLayers] = []
    with_state = attending = with_mlp = 0
    for layer in layers:
        mixers = _mixers(layer)
        attention = [x for x in layer.modules() if type(x).__name__.endswith("Attention") and x not in mixers]
        states += mixers.values()
        with_state, attending = with_state + bool(mixers), attending + bool(attention)
        others = _elements(layer) - sum(map(_elements, (*mixers, *attention[:1])))
        with_mlp += others > 8 * hidden  # more elements than norms have
    if not states:
        return {}
    largest = max(states, key=lambda sizes: (sizes.heads * sizes.keys * sizes.values, sizes.weights))
    largest = dataclasses.replace(largest, count=with_state)
    return {"states": largest, "attention_layers": attending, "mlp_layers": with_mlp}


def _mixers(module: nn.Module) -> dict[nn.Module, StateLayers]:
    """Return the outermost modules that have a state or a convolution, along with their sizes."""
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
    # without LoRA's layers, and with the same names as without LoRA
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
