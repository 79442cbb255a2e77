"""`python -m ds_seqpar perplexity`: the perplexity of one text that is longer than fits, on the ranks of a launcher or
in one process, with its loss by position."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ..analysis.draw import new_figure, save
from ..errors import SECTION, ConfigError, as_seqpar_error
from ..files import read_text
from ..models import PACKAGES, imported
from ..runtime import groups
from ..runtime.agreement import all_gather_objects, assert_ranks_agree
from . import options
from .launched import file_error, launched

CHUNK = 1024  # tokens a rank that a forward takes: their logits are held at once
LARGEST_TEXT = 2**32  # bytes
STRETCHES = 32  # of the text, whose mean losses are shown
WIDTH = 40  # of the longest bar


def run(args: argparse.Namespace) -> None:
    """Run the command. Collective over the ranks; a launcher need not have started any.

    Raises:
        SeqParError: On all ranks, if one of them cannot read the model or the text, or they differ.
    """
    chunk = None if args.chunk is None else options.tokens("--chunk", args.chunk)
    settings = options.content_of(args).get(SECTION, {})
    hugging_face = PACKAGES["PreTrainedModel"]
    with launched("perplexity", alone=True) as is_first:
        found, error, control = {}, None, groups.control_world()
        try:
            if is_first and args.out is not None:
                _check_picture(args.out)
            texts: Any = imported(f"{hugging_face}.generation.perplexity")
            model, ids = texts.load(args.model, read_text(args.text, "--text", most=LARGEST_TEXT))
            digest = hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).hexdigest()
            found = {"tokens": len(ids), "digest of tokens": digest, "chunk": chunk}
        except Exception as reason:
            error = as_seqpar_error("reading the model and the text of perplexity failed", reason)
        assert_ranks_agree(control, "text", found, error=error, call="perplexity")
        with imported(hugging_face).share_sequences(model, **{"size": dist.get_world_size(), **settings}) as sp:
            if sp.data_size > 1:
                raise ConfigError(f"perplexity needs all ranks for its text; got size {sp.size}, leave it out")
            model.to(sp.device)
            began, losses = time.perf_counter(), []
            with tqdm(desc="perplexity", total=len(ids) - 1, unit=" tokens", disable=not is_first) as bar:
                for chunk_losses, cache_bytes in texts.token_losses(model, ids, chunk or CHUNK * sp.size):
                    losses.append(chunk_losses)
                    bar.set_postfix_str(f"cache {cache_bytes / 2**20:,.2f} MiB a rank", refresh=False)
                    bar.update(len(chunk_losses))
            caches = [size for _, size in all_gather_objects(control, ("caches", cache_bytes))]
            if is_first:
                _report(args, torch.cat(losses), time.perf_counter() - began, caches)


def _check_picture(file: str) -> None:
    new_figure(1, 1)
    if not file.endswith((".svg", ".png")):
        raise ConfigError(f"--out must be a file that ends with .svg or .png; got {file!r}")
    if error := file_error("--out", file):
        raise error


def _report(args: argparse.Namespace, losses: Tensor, seconds: float, caches: list[int]) -> None:
    """Print the figures, and draw the losses by position.

    Args:
        losses: Of all tokens but the first (tokens - 1,).
        seconds: That they took.
        caches: The bytes of each rank's cache.
    """
    loss, end, stretches = float(losses.mean()), 1, []
    for stretch in losses.tensor_split(min(STRETCHES, len(losses))):
        stretches.append((end, end + len(stretch) - 1, float(stretch.mean())))  # positions in the text, from 0
        end += len(stretch)
    perplexity, rate = math.exp(loss) if loss < 700 else math.inf, len(losses) / seconds
    if args.json:
        found: dict[str, Any] = {"perplexity": perplexity, "loss": loss, "tokens": len(losses), "seconds": seconds}
        found |= {"tokens_per_second": rate, "cache_bytes": caches, "by_position": stretches}
        print(json.dumps(found, indent=1))
    else:
        ranks, cache = f"{len(caches)} rank{'s' * (len(caches) > 1)}", max(caches) / 2**20
        print(f"perplexity {perplexity:.6g}: mean loss {loss:.6f} of {len(losses):,} tokens")
        print(f"{rate:,.1f} tokens/s on {ranks}, cache at most {cache:,.2f} MiB a rank\n\n{'positions':>21}  loss")
        longest = max(mean for *_, mean in stretches) or 1.0
        for first, last, mean in stretches:
            print(f"{first:>10,}-{last:<10,} {mean:8.4f} {'#' * round(WIDTH * mean / longest)}")
    if args.out is not None:
        figure = new_figure(8, 4)
        axes = figure.add_subplot()
        axes.stairs([mean for *_, mean in stretches], [*(first for first, *_ in stretches), end], baseline=None)
        axes.set(xlabel="position in the text, in tokens", ylabel="loss", title=f"perplexity {perplexity:.6g}")
        save(figure, args.out)
