"""Compute the perplexity, and the loss by position, of a text that is too long for one rank.

    torchrun --nproc-per-node 4 examples/perplexity.py --model FOLDER --text FILE

The folder contains a causal language model and its tokenizer, as written by `save_pretrained`. The model processes the
text chunk by chunk, each time with the cache of earlier chunks. Ranks share each chunk: a rank caches the keys and
values of its own tokens, and computes the losses of its own logits. Every token except the first is predicted from all
preceding tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from ds_seqpar.whole import plain
from hf_integration import share_sequences

STRETCHES, WIDTH = 32, 40  # number of parts of the text with a mean loss each; characters of the longest bar


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids: Tensor, chunk: int) -> Iterator[Tensor]:
    """Yield the fp64 losses of all tokens except the first, as one tensor (tokens,) per chunk.

    Args:
        model: A patched model in evaluation mode.
        ids: The text's token ids (tokens,), the same on all ranks.
        chunk: The number of tokens per forward pass, which does not affect the losses.
    """
    cache = DynamicCache(config=model.config)
    for tokens, labels in zip(ids[:-1].split(chunk), ids[1:].split(chunk), strict=True):
        logits = model(input_ids=tokens[None], past_key_values=cache, use_cache=True).logits.flatten(0, 1)
        losses = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="none")
        yield plain(losses).double().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--chunk", type=int, metavar="N", help="tokens of a forward; default: 1,024 a rank")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True).eval()
    ids = torch.tensor(tokenizer(Path(args.text).read_text(encoding="utf-8"), verbose=False)["input_ids"])
    if len(ids) < 2:
        parser.error(f"--text must have two tokens or more; got {len(ids)}, give a longer one")
    dist.init_process_group()
    with share_sequences(model, size=dist.get_world_size()) as sp:
        model.to(sp.device)
        losses = []
        with tqdm(total=len(ids) - 1, unit=" tokens", disable=sp.rank > 0) as bar:
            for chunk in token_losses(model, ids.to(sp.device), args.chunk or 1024 * sp.size):
                losses.append(chunk)
                bar.update(len(chunk))
    dist.destroy_process_group()
    if sp.rank == 0:
        report(torch.cat(losses))


def report(losses: Tensor) -> None:
    loss, first = float(losses.mean()), 1
    print(f"perplexity {math.exp(loss):.6g}: mean loss {loss:.6f} of {len(losses):,} tokens\n\n{'positions':>21}  loss")
    stretches = losses.tensor_split(min(STRETCHES, len(losses)))
    longest = max(float(stretch.mean()) for stretch in stretches)
    for stretch in stretches:
        mean, last = float(stretch.mean()), first + len(stretch) - 1
        print(f"{first:>10,}-{last:<10,} {mean:8.4f} {'#' * round(WIDTH * mean / longest)}")
        first = last + 1


if __name__ == "__main__":
    main()
