"""accelerate's loaders, told groups in place of ranks: for the Trainer, and loops with an Accelerator."""

from __future__ import annotations

import copy
import functools
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset

from ds_seqpar import SequenceParallel
from ds_seqpar.loaders import is_dealt

from .streams import Stream


def prepare_loader(loader: DataLoader, sp: SequenceParallel, **settings: Any) -> DataLoader:
    """accelerate's own preparation of a loader, told which group of ranks this one works for instead of which rank it
    is. `Accelerator.prepare` then leaves it as it is. loader: over the whole data set, the same on every rank, or with
    `sp.sampler`. Its batches come to `sp.device`; whole sequences need not be on a device: put_on_device=False leaves
    them. One of torchdata's StatefulDataLoader stays one.

    settings: further ones of `accelerate.data_loader.prepare_data_loader`. Raises ConfigError for a sampler that is for
    ranks and not for groups.
    """
    parts, part = (1, 0) if is_dealt(sp, loader) else (sp.data_size, sp.data_rank)
    seeding = loader.worker_init_fn
    if isinstance(seeding, functools.partial) and "rank" in seeding.keywords:
        loader.worker_init_fn = functools.partial(seeding, rank=sp.data_rank)
    if isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "shard"):  # of `datasets`
        loader = copy.copy(loader)
        vars(loader)["dataset"] = Stream(loader.dataset)  # which a DataLoader does not let be changed
    prepared: Any = prepare_data_loader(
        loader,
        num_processes=parts,
        process_index=part,
        **{
            "device": sp.device,
            "put_on_device": True,
            "dispatch_batches": False,  # or the first rank would hand every rank another part of a batch
            "rng_types": ["generator"],
            "use_stateful_dataloader": hasattr(loader, "state_dict"),
            **settings,
        },
    )
    prepared._is_accelerate_prepared = True  # what `Accelerator.prepare` looks for
    return prepared
