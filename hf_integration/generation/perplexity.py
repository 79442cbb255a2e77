"""The loss of each token of a text that no rank could hold, chunk by chunk over a cache in parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from ds_seqpar.errors import ConfigError, InputError
from ds_seqpar.files import quiet
from ds_seqpar.whole import plain

TOKENIZER = "perplexity needs the tokenizer beside its model; got {} without one, call tokenizer.save_pretrained there"


def load(folder: str, text: str) -> tuple[PreTrainedModel, Tensor]:
    """Return the model of a folder, and the token ids (tokens,) of a text by the tokenizer of that folder.

    Raises:
        ConfigError: The folder has no model, or no tokenizer.
        InputError: The text is shorter than two tokens, or the model cannot take its tokens.
    """
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ConfigError(
            f"--model must be a folder that save_pretrained wrote; got {folder}, which has no config.json"
        )
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(TOKENIZER.format(folder)) from error
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    if len(ids) < 2:
        raise InputError(f"perplexity needs a text of two tokens or more; got {len(ids)}, give a longer one")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    words, last = model.get_input_embeddings(), len(ids) - 1
    if (largest := int(ids.max())) >= words.num_embeddings:
        raise InputError(f"the tokenizer must be the model's, which knows {words.num_embeddings} ids; got id {largest}")
    positions = getattr(model.config, "max_position_embeddings", None) or last
    for module in model.modules():  # positions that are learned; some models number them from 1 or 2
        learned = isinstance(module, nn.Embedding) and 0 <= module.num_embeddings - positions <= 2
        if learned and module is not words and positions < last:
            raise InputError(f"the model has learned {positions} positions; got a text of {len(ids)} tokens, cut it")
    return model, ids


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids: Tensor, chunk: int) -> Iterator[tuple[Tensor, int]]:
    """Yield the losses of a text's tokens but its first, those of one chunk after another.

    Of a patched model each rank computes and holds the logits of its own tokens, and keeps their part of the cache.
    Collective over the ranks of the sequence.

    Args:
        model: A causal language model, in evaluation mode.
        ids: The text's token ids (tokens,), the same on all ranks.
        chunk: How many tokens a forward takes; losses do not depend on it.

    Yields:
        The losses (tokens of the chunk,) in fp64 on the CPU, and the bytes of this rank's cache by then.
    """
    cache, ids = DynamicCache(config=model.config), ids.to(model.device)
    for tokens, labels in zip(ids[:-1].split(chunk), ids[1:].split(chunk), strict=True):
        losses = _losses(model, tokens, labels, cache).double().cpu()
        held: list[Any] = [kept for layer in cache.layers for kept in getattr(layer, "held", [layer])]
        yield losses, sum(kept.keys.nbytes + kept.values.nbytes for kept in held)


def _losses(model: PreTrainedModel, tokens: Tensor, labels: Tensor, cache: DynamicCache) -> Tensor:
    logits = model(input_ids=tokens[None], past_key_values=cache, use_cache=True).logits.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return plain(F.cross_entropy(logits, labels, reduction="none"))
