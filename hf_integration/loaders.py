"""Data loaders that give the ranks of a sequence the same batches, and other groups other ones."""

from __future__ import annotations

import functools
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from ds_seqpar import SequenceParallel


def prepare_loader(loader: DataLoader, sp: SequenceParallel, **settings: Any) -> DataLoader:
    """accelerate's own preparation of a loader, told which group of ranks this one works for instead of which rank it
    is. `Accelerator.prepare` then leaves it as it is. loader: over the whole data set, the same on every rank. Its
    batches come to `sp.device`; whole sequences need not be on a device: put_on_device=False leaves them.

    settings: further ones of `accelerate.data_loader.prepare_data_loader`.
    """
    seeding = loader.worker_init_fn
    if isinstance(seeding, functools.partial) and "rank" in seeding.keywords:
        loader.worker_init_fn = functools.partial(seeding, rank=sp.data_rank)
    prepared: Any = prepare_data_loader(
        loader,
        num_processes=sp.data_size,
        process_index=sp.data_rank,
        **{"device": sp.device, "put_on_device": True, "rng_types": ["generator"], **settings},
    )
    prepared._is_accelerate_prepared = True  # what `Accelerator.prepare` looks for
    return prepared
