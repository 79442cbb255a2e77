"""The numbers of a model, from its config.json: counted here for plain families, else on transformers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..compiler.schedules.base import is_count
from ..errors import ConfigError
from ..files import read_json
from ..limits import check_model
from ..planner.request import Model

# family -> biases of the q, k and v projections, unless attention_bias says it; parameters of norms of a head's q and k
PLAIN = {"llama": (None, 0), "mistral": (False, 0), "qwen2": (True, 0), "qwen3": (None, 2)}
DTYPES = (None, "float32", "bfloat16", "float16")
ROPES = (None, "default", "llama3")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "vocab_size", "head_dim")  # fmt: skip


def numbers_of(place: str) -> Model:
    """From a folder with a config.json, or that file. Raises ConfigError for one that is none, or that is not known.

    Of a plain decoder the numbers follow from its config alone. For all others, and for whatever is odd in a config,
    transformers is asked, which takes seconds to import.
    """
    file = Path(place, "config.json") if Path(place).is_dir() else Path(place)
    try:
        found = counted(read_json(file, "--model")) if file.exists() else None
    except ConfigError:
        found = None  # the sentence is that of who reads it next
    if found is not None:
        return found
    from ..models import numbers_of as made

    return made(place)


def counted(content: dict[str, Any]) -> Model | None:
    """None for what is not surely a plain decoder."""
    family = content.get("model_type")
    if family not in PLAIN or "quantization_config" in content:
        return None
    width, count = content.get("hidden_size"), content.get("num_attention_heads")
    if family != "qwen3" and isinstance(width, int) and isinstance(count, int) and count and width % count == 0:
        content = {"head_dim": width // count, **content}
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
    dtypes = [content.get(name) for name in ("dtype", "torch_dtype")]
    if kind not in ROPES or content.get("hidden_act", "silu") != "silu" or any(x not in DTYPES for x in dtypes):
        return None
    flags = [content.get(name, False) for name in ("attention_bias", "mlp_bias", "tie_word_embeddings")]
    if not all(is_count(content.get(name)) for name in NEEDED) or not all(type(flag) is bool for flag in flags):
        return None
    hidden, wide, layers, heads, kv_heads, vocab, head_dim = (content[name] for name in NEEDED)
    if heads % kv_heads:
        return None
    check_model(content)
    (said, norms), (biased, mlp_biased, tied) = PLAIN[family], flags
    q, kv = heads * head_dim, kv_heads * head_dim
    layer = 2 * hidden * (q + kv) + 3 * hidden * wide + 2 * hidden + norms * head_dim
    if said or (said is None and biased):
        layer += q + 2 * kv + (0 if said else hidden)
    if family == "llama" and mlp_biased:
        layer += 2 * wide + hidden
    return Model(
        hidden=hidden,
        intermediate=wide,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        parameters=layers * layer + (1 if tied else 2) * vocab * hidden + hidden,
        layer_parameters=layer,
        tied=tied,
    )
