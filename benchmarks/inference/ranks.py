"""The part of `benchmarks.inference` that runs on ranks: the contenders' models and steps."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import hf_integration
from benchmarks.contenders import parse
from benchmarks.memory.ranks import Model
from benchmarks.turns import Step, in_turns, together
from ds_seqpar.core.compiler.sharding.layout import Run
from hf_integration.generation.cache import BLOCK, Row, kept_of

Make = Callable[..., Step]  # (arguments, model, contender, length) -> step
ONE, GATHERING, TRAINING = "one rank", "gathering", "training's forward"


def take_turns(
    args: argparse.Namespace, make: Make, names: list[str], length: int
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Return, by contender, the seconds of each turn, and what each turn generated."""
    sizes = {field.name: getattr(args, field.name) for field in dataclasses.fields(Model) if field.name in args}
    model = Model(**sizes).make().eval()
    model.generation_config.eos_token_id = None
    steps, given = {}, {name: list[Any]() for name in names}
    for name in names:
        its = twin(model)
        if name != ONE and not (name == GATHERING and make is decode):
            spelled = {GATHERING: f"attention2d={dist.get_world_size()},1", TRAINING: names[1]}.get(name, name)
            hf_integration.share_sequences(its, size=dist.get_world_size(), **parse(spelled).section)
        waits = name == ONE and dist.get_rank()
        step = (lambda: None) if waits else make(args, its, name, length)
        steps[name] = lambda step=step, found=given[name]: found.append(step())
    return in_turns(steps, args.rounds, together()), given


def twin(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Copy a model, sharing the parameters' memory."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def prefill(args: argparse.Namespace, model: LlamaForCausalLM, name: str, length: int) -> Step:
    ids = tokens(args, length)
    if name == TRAINING:
        sp = hf_integration.patched_with(model)
        batch = sp.shard_batch({"input_ids": ids, "labels": ids})

        def train() -> None:
            model.train()
            model(**batch)
            model.eval()

        return train
    return lambda: model.generate(ids, max_new_tokens=1, do_sample=False, use_cache=True)[0, -1].item()


def decode(args: argparse.Namespace, model: LlamaForCausalLM, name: str, length: int) -> Step:
    cache = filled(args, model, name, length)
    ids = tokens(args, length + 1)  # the last token is not yet in the cache

    def step() -> Any:
        nonlocal ids
        options = {"max_new_tokens": args.tokens, "do_sample": False, "use_cache": True}
        ids = model.generate(ids, past_key_values=cache, **options)
        return ids[0, -args.tokens :].tolist()

    return step


def tokens(args: argparse.Namespace, length: int) -> Tensor:
    return torch.randint(args.vocab, (1, length), generator=torch.Generator().manual_seed(1))


def filled(args: argparse.Namespace, model: LlamaForCausalLM, name: str, length: int) -> DynamicCache:
    """Return a cache of `length` random tokens: this rank's part, or all tokens for the contender "one rank"."""
    world, rank = (1, 0) if name == ONE else (dist.get_world_size(), dist.get_rank())
    shape = (2, 1, args.kv_heads, length, args.hidden // args.heads)
    layers = (torch.randn(shape, generator=torch.Generator().manual_seed(index)) for index in range(args.layers))
    parts = ((keys[:, :, rank::world], values[:, :, rank::world]) for keys, values in layers)
    if name not in (ONE, GATHERING):
        return in_parts(model, length, parts)
    cache = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(parts):
        if name == GATHERING:
            cache.layers[index] = Gathered(length)
        DynamicLayer.update(cache.layers[index], keys, values)
    return cache


@torch.no_grad()
def in_parts(model: LlamaForCausalLM, length: int, parts: Iterable[tuple[Tensor, Tensor]]) -> DynamicCache:
    """Return the cache of a patched model after a prompt of `length` tokens, without computing the prompt.

    Each rank has every size-th token. `parts` yields this rank's keys and values of each layer.
    """
    cache = model(torch.zeros(1, BLOCK, dtype=torch.long), use_cache=True).past_key_values
    kept = kept_of(cache)
    size = kept.sp.size
    runs = tuple((Run(rank, size, len(range(rank, length, size))),) for rank in range(size))
    kept.columns, kept.rows = length, (Row(length, runs),)
    for layer, part in zip(cache.layers, parts, strict=True):
        layer.held[0].keys, layer.held[0].values = (F.pad(x, (0, 0, 0, -x.shape[2] % BLOCK)) for x in part)
    return cache


class Gathered(DynamicLayer):
    """Caches this rank's part of a layer's keys and values, and gathers all parts for each new token."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total  # tokens on all ranks

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.total % dist.get_world_size() == dist.get_rank():  # ranks take turns in caching new tokens
            super().update(key_states, value_states)
        self.total += key_states.shape[2]
        return gathered(self.keys, self.total), gathered(self.values, self.total)

    def get_seq_length(self) -> int:
        return self.total


def gathered(part: Tensor, total: int) -> Tensor:
    """Gather all ranks' parts (rows, heads, tokens, head_dim), whose lengths differ by at most one token."""
    world = dist.get_world_size()
    parts = [part.new_empty(*part.shape[:2], -(-total // world), part.shape[3]) for _ in range(world)]
    dist.all_gather(parts, F.pad(part, (0, 0, 0, parts[0].shape[2] - part.shape[2])))
    return torch.cat([x[:, :, : len(range(rank, total, world))] for rank, x in enumerate(parts)], 2)
