"""Needle in a haystack: train a model to find needles, then test the model on prompts that no rank holds completely.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/needle.py

A haystack is a row of filler words. A needle consists of a key and its value, made of other words. Needles are written
backwards, so that two layers learn to read them within about a minute: the first layer finds the word before each word,
and the second layer searches for the last word. Ranks share each row, both in training and in `model.generate`. During
`generate`, each rank caches the keys and values of its own tokens of the prompt.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hf_integration import share_sequences

FILLERS, WORDS = 16, 32  # vocabulary: the words of hay, then those of needles
NEEDLES, WIDTH = 4, 4  # needles in a haystack; words per needle: a key and three for its value
LONGEST = 256  # maximum tokens of a haystack in training
LENGTHS, DEPTHS = (64, 128, 256, 512, 1024), (0.0, 0.25, 0.5, 0.75, 1.0)  # tested lengths and depths


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same model on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": FILLERS + WORDS, "num_key_value_heads": 2, "attention_bias": True, "eos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope, initializer_range=0.1))


def haystacks(rows: int, length: int, depth: float | None = None) -> tuple[Tensor, Tensor]:
    """Return haystacks (rows, length) and their needles (rows, NEEDLES, WIDTH).

    The first needle is placed at the given depth from 0 to 1, and the other needles are placed randomly. Without a
    depth, all needles are placed randomly.
    """
    words = torch.rand(rows, WORDS).argsort(1)[:, : NEEDLES * WIDTH] + FILLERS  # each word occurs once per row
    needles = words.view(rows, NEEDLES, WIDTH)
    places = torch.rand(rows, length // WIDTH).argsort(1)
    if depth is not None:
        first = round(depth * (length // WIDTH - 1))
        places = torch.cat([torch.full((rows, 1), first), places[places != first].view(rows, -1)], 1)
    index = places[:, :NEEDLES, None] * WIDTH + torch.arange(WIDTH)
    hay = torch.randint(0, FILLERS, (rows, length))
    return hay.scatter(1, index.flatten(1), needles.flip(2).flatten(1)), needles


def batch_of(progress: float) -> tuple[Tensor, Tensor]:
    """Return rows that query all needles of a haystack, and labels for the values of the needles.

    Hay is added after half of the steps, when the model has learned needles without hay.
    """
    most = NEEDLES + (LONGEST // WIDTH - NEEDLES) * min(1.0, max(0.0, 3 * progress - 1.5))
    hay, needles = haystacks(32, WIDTH * int(torch.randint(NEEDLES, int(most) + 1, ())))
    values = needles.clone()
    values[:, :, 0] = -100  # the queried key is unpredictable
    labels = torch.cat([torch.full_like(hay, -100), values.flatten(1)], 1)
    return torch.cat([hay, needles.flatten(1)], 1), labels


def accuracy(model: LlamaForCausalLM, length: int, depth: float) -> float:
    """Return the share of haystacks for which the model generates the whole value of the needle at a depth, given its
    key.
    """
    hay, needles = haystacks(16, length, depth)
    prompt = torch.cat([hay, needles[:, 0, :1]], 1).to(model.device)
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=WIDTH - 1, do_sample=False)
    return (ids[:, length + 1 :].cpu() == needles[:, 0, 1:]).all(1).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700)
    args = parser.parse_args()
    dist.init_process_group()
    llama = small_llama()
    sp = share_sequences(llama, size=dist.get_world_size())
    model = DistributedDataParallel(llama.to(sp.device))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    for step in range(args.steps):
        progress = step / args.steps
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 40, 4 - 4 * progress)
        ids, labels = batch_of(progress)  # the same on every rank
        loss = model(input_ids=ids.to(sp.device), labels=labels.to(sp.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if sp.rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    llama.eval()
    table = [[accuracy(llama, length, depth) for depth in DEPTHS] for length in LENGTHS]
    if sp.rank == 0:
        print(f"\nneedles found, by tokens of the prompt and depth\n{'':6}", *(f"{depth:5}" for depth in DEPTHS))
        for length, row in zip(LENGTHS, table, strict=True):
            print(f"{length:6}", *(f"{share:5.0%}" for share in row))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
