"""Sizes and parameter counts of a model, from its config.json.

For four plain families a formula is enough. For any other, transformers makes the model without allocating memory for
its weights.
"""

from __future__ import annotations

import os
from typing import Any

from ..compiler.schedules.base import is_count
from ..errors import ConfigError
from ..files import read_json
from ..planner.limits import check_model
from ..planner.request import Model

# family -> (whether q, k and v projections have biases, number of norms with head_dim weights in a layer's attention).
# None: the config's attention_bias decides, for the output projection too
PLAIN = {"llama": (None, 0), "mistral": (False, 0), "qwen2": (True, 0), "qwen3": (None, 2)}
DTYPES = (None, "float32", "bfloat16", "float16")
ROPES = (None, "default", "llama3")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "vocab_size", "head_dim")  # fmt: skip


def numbers_of(place: str) -> Model:
    """Return the model of a config.json, or of a folder that has one.

    The numbers of a plain decoder follow from its config alone. For any other family, and for a config with anything
    unusual, transformers counts; its import takes seconds.

    Raises:
        ConfigError: If the file cannot be read, or the family is not supported.
    """
    # os.path: a name that is too long for any file is one that does not exist, where Path raises
    file = os.path.join(place, "config.json") if os.path.isdir(place) else place
    try:
        model = plain_model(read_json(file, "--model")) if os.path.exists(file) else None
    except ConfigError:
        model = None  # transformers' reader below raises a better message
    if model is not None:
        return model
    from ..models import numbers_of as numbers_by_transformers

    return numbers_by_transformers(place)


def plain_model(content: dict[str, Any]) -> Model | None:
    """Return the model of a config.json's content, by the formula of a plain decoder; None if the formula may be
    wrong."""
    family = content.get("model_type")
    if not isinstance(family, str) or family not in PLAIN or "quantization_config" in content:
        return None
    width, count = content.get("hidden_size"), content.get("num_attention_heads")
    if family != "qwen3" and isinstance(width, int) and isinstance(count, int) and count and width % count == 0:
        content = {"head_dim": width // count, **content}
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
    dtypes = [content.get(name) for name in ("dtype", "torch_dtype")]
    if (
        rope_type not in ROPES
        or content.get("hidden_act", "silu") != "silu"
        or any(dtype not in DTYPES for dtype in dtypes)
    ):
        return None
    flags = [content.get(name, False) for name in ("attention_bias", "mlp_bias", "tie_word_embeddings")]
    if not all(is_count(content.get(name)) for name in NEEDED) or not all(type(flag) is bool for flag in flags):
        return None
    hidden, intermediate, layers, heads, kv_heads, vocab, head_dim = (content[name] for name in NEEDED)
    if heads % kv_heads:
        return None
    check_model(content)
    (family_bias, norms), (attention_bias, mlp_bias, tied) = PLAIN[family], flags
    q, kv = heads * head_dim, kv_heads * head_dim
    layer = 2 * hidden * (q + kv) + 3 * hidden * intermediate + 2 * hidden + norms * head_dim
    if family_bias or (family_bias is None and attention_bias):
        layer += q + 2 * kv + (0 if family_bias else hidden)
    if family == "llama" and mlp_bias:
        layer += 2 * intermediate + hidden
    return Model(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        parameters=layers * layer + (1 if tied else 2) * vocab * hidden + hidden,
        layer_parameters=layer,
        tied=tied,
    )
