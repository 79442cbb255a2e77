"""What the ranks of a sequence compare of a patched model: all before the first forward, a few weights later."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from ds_seqpar.compat import whole_shape
from ds_seqpar.errors import ConfigError

from ..compat import FLATTENED, ZERO_ID

ODD = 0x1E3779B97F4A7C15  # digits of the golden ratio, as hashes take them
PIECE = 1 << 22  # bytes of a tensor that are digested at a time
SAMPLES = 8  # values of each parameter that ranks compare in the first forward
WATCHED, WATCHED_SAMPLES = 8, 64  # parameters that they compare in later forwards, at least, and values of each
OFTEN = 64  # the most training forwards between two comparisons


def compares_weights(forward: int) -> bool:
    """Return whether ranks compare weights of their n-th training forward: the 2nd, 4th, 8th, ..., and every 64th."""
    return forward > 1 and (forward & (forward - 1) == 0 or forward % OFTEN == 0)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the mean absolute value of some values of some trained parameters, the last one included, by name.

    Ranks compare these while a model is trained: gradients that are not averaged over ranks change all of them. Frozen
    parameters show nothing, nor do parts of parameters, as ZeRO-3 and FSDP leave on each rank.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and is_whole(p)]
    return {name: _spread(p, WATCHED_SAMPLES).abs().mean() for name, p in trained[:: -max(1, len(trained) // WATCHED)]}


def fingerprint(model: nn.Module) -> dict[str, object]:
    """Return what ranks compare of a model: dtypes, layers, RoPE, the shape and some values of
    every parameter, those of buffers, and what is trained.

    What explains a difference best comes first. Parameters that ZeRO-3 or FSDP partitions, or that are on the meta
    device, have no values to compare.
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
    """Raise ConfigError for a model inside FSDP1, whose flat parameters ranks cannot compare."""
    if any(hasattr(p, FLATTENED) for p in model.parameters()):
        raise ConfigError(
            "a model that shares sequences needs fully_shard, DDP or DeepSpeed; got FullyShardedDataParallel (FSDP1), "
            "which is not supported, use torch.distributed.fsdp.fully_shard (fsdp_version=2 in accelerate)"
        )


def digest_of_bits(x: Tensor) -> int:
    """Return a digest of a tensor's bits and their places, of 64 bits: the same on every device and in every release.

    It is a sum of 8 bytes at a time, each times an odd number of its place, modulo 2^64. So no order of the sum counts,
    one value that differs always shows, and others but for one case in billions.
    """
    flat, total = x.detach().reshape(-1), 0
    numbers = torch.arange(1, min(PIECE, flat.nbytes) // 8 + 2, device=flat.device) * ODD
    numbers = (numbers ^ (numbers >> 29)) * ODD | 1  # integers wrap
    for piece in flat.split(PIECE // flat.element_size()):
        words = torch.nn.functional.pad(piece.clone().view(torch.uint8), (0, -piece.nbytes % 8)).view(torch.int64)
        total = (total * ODD + int((words * numbers[: len(words)]).sum())) % (1 << 64)
    return total


def is_whole(p: Tensor) -> bool:
    return not hasattr(p, ZERO_ID) and not p.is_meta and type(p.data) is Tensor and p.numel() > 0


def _samples(parameters: dict[str, Tensor]) -> dict[str, str]:
    """Return a digest of some values of each parameter, by name. All are copied from the device at once."""
    samples = [_spread(p) for p in parameters.values()]
    samples = [x.cpu() for x in samples] if len({x.device for x in samples}) > 1 else samples
    values = torch.cat(samples).cpu().split([len(x) for x in samples]) if samples else []
    return {
        name: hashlib.blake2b(x.numpy().tobytes(), digest_size=4).hexdigest()
        for name, x in zip(parameters, values, strict=True)
    }


def _spread(p: Tensor, samples: int = SAMPLES) -> Tensor:
    flat = p.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    samples = min(samples, len(flat))
    # by integers: floats in fp32 cannot hold an index above 2^24, and round the last one up
    indices = torch.arange(samples, device=flat.device) * (len(flat) - 1) // max(samples - 1, 1)
    return flat[indices].double()
