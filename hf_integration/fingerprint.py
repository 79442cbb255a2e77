"""What ranks that share a sequence must have in common in their models, as fields that can be compared."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

SAMPLES = 8  # values of a parameter that are compared


def fingerprint(model: nn.Module) -> dict[str, object]:
    """Name -> what to compare: dtypes, layers, RoPE, and of every parameter its shape and some values, what says most
    first.

    Values are those that a rank holds whole: not of parameters that ZeRO-3 or FSDP partitions, or that are on meta.
    """
    parameters = dict(model.named_parameters())
    trained = [name for name, p in parameters.items() if p.requires_grad]
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
    values = _samples({name: p for name, p in parameters.items() if _is_whole(p)})
    return {
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()})),
        "layers": getattr(model.config, "num_hidden_layers", None),
        "rope": getattr(model.config, "rope_parameters", None),
        "trained parameters": len(trained),
        **{f"shape of {name}": shape for name, shape in shapes.items()},
        **{f"values of {name}": digest for name, digest in values.items()},
    }


def _is_whole(p: nn.Parameter) -> bool:
    return not hasattr(p, "ds_shape") and not p.is_meta and type(p.data) is Tensor and p.numel() > 0


def _samples(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """A digest of some values of each, copied from a device together."""
    taken = [_spread(p) for p in parameters.values()]
    values = torch.cat(taken).cpu().split([len(x) for x in taken]) if taken else []
    return {
        name: hashlib.blake2b(x.numpy().tobytes(), digest_size=4).hexdigest()
        for name, x in zip(parameters, values, strict=True)
    }


def _spread(p: nn.Parameter) -> Tensor:
    flat = p.detach().reshape(-1)
    at = torch.linspace(0, len(flat) - 1, min(SAMPLES, len(flat)), device=flat.device).long()
    return flat[at].double()
