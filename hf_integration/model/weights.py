"""Compare a patched model between the ranks that share a sequence.

Ranks compare the whole model in the first forward, and a few weights in later forwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ds_seqpar.base.compat import whole_shape
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.base.fingerprint import Fingerprint
from ds_seqpar.data.value_checks import device_digest

from ..compat import FLATTENED, ZERO_ID

PIECE = 1 << 20  # number of tensor elements to hash at a time
SAMPLES = 8  # number of values per parameter to compare in the first forward
# minimum number of parameters, and number of values per parameter, to compare in later forwards
WATCHED, WATCHED_SAMPLES = 8, 64
OFTEN = 64  # maximum number of training forwards between two comparisons


def compares_weights(forward: int) -> bool:
    """Return whether ranks compare weights in the given training forward.

    Ranks compare in the 2nd, 4th, 8th, ... and in every 64th forward.
    """
    return forward > 1 and (forward & (forward - 1) == 0 or forward % OFTEN == 0)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the mean absolute value of sampled weights, by name, for some trained parameters including the last one.

    Ranks compare these values during training, since weights would diverge if gradients were not averaged over ranks.
    Frozen and partitioned parameters (ZeRO-3, FSDP) are skipped, since comparing them would reveal nothing.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and is_whole(p)]
    return {name: _spread(p, WATCHED_SAMPLES).abs().mean() for name, p in trained[:: -max(1, len(trained) // WATCHED)]}


def fingerprint(model: nn.Module) -> dict[str, object]:
    """Return the properties of a model that ranks compare.

    The properties are dtypes, layers, RoPE settings, the names of trained parameters, and the shapes and sampled values
    of all parameters and buffers. Entries that best explain a difference come first. Parameters that ZeRO-3 or FSDP
    partitions, or that are on the meta device, have no values to compare.
    """
    parameters = dict(model.named_parameters())
    trained = [name for name, p in parameters.items() if p.requires_grad]
    shapes = {name: whole_shape(p) for name, p in parameters.items()}
    values = _samples({name: x for name, x in (*parameters.items(), *model.named_buffers()) if is_whole(x)})
    return {
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()})),
        "layers": getattr(model.config, "num_hidden_layers", None),
        "rope": getattr(model.config, "rope_parameters", None),
        "trained parameters": len(trained),
        **{f"shape of {name}": shape for name, shape in shapes.items()},
        **{f"values of {name}": digest for name, digest in values.items()},
        **{f"trained {name}": True for name in trained},
    }


def check_not_flattened(model: nn.Module) -> None:
    """Raise ConfigError for a model inside FSDP1, since ranks cannot compare its flat parameters."""
    if any(hasattr(p, FLATTENED) for p in model.parameters()):
        raise ConfigError(
            "a model that shares sequences needs fully_shard, DDP or DeepSpeed; got FullyShardedDataParallel (FSDP1), "
            "which is not supported, use torch.distributed.fsdp.fully_shard (fsdp_version=2 in accelerate)"
        )


def fingerprint_of_bits(x: Tensor) -> Fingerprint:
    """Return a fingerprint of a tensor's bits in order. Equal bits have equal fingerprints on every device and in every
    release.
    """
    return Fingerprint.of([int(device_digest(piece)) for piece in x.detach().reshape(-1).split(PIECE)])


def is_whole(p: Tensor) -> bool:
    return not hasattr(p, ZERO_ID) and not p.is_meta and type(p.data) is Tensor and p.numel() > 0


def _samples(parameters: dict[str, Tensor]) -> dict[str, str]:
    """Return a digest of each parameter's sampled values, by name. All samples are copied from the device at once."""
    samples = [_spread(p) for p in parameters.values()]
    samples = [x.cpu() for x in samples] if len({x.device for x in samples}) > 1 else samples
    values = torch.cat(samples).cpu().split([len(x) for x in samples]) if samples else []
    found = (Fingerprint.of_bytes(x.numpy().tobytes()) for x in values)
    return {name: str(fingerprint) for name, fingerprint in zip(parameters, found, strict=True)}


def _spread(p: Tensor, samples: int = SAMPLES) -> Tensor:
    flat = p.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    samples = min(samples, len(flat))
    # computed in integers, since fp32 cannot represent all indices above 2^24 and would round up the last index
    indices = torch.arange(samples, device=flat.device) * (len(flat) - 1) // max(samples - 1, 1)
    return flat[indices].double()
