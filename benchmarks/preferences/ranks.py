"""The part of `benchmarks.preferences` that runs on ranks: steps with a preference or RL loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head, selective_log_softmax

from benchmarks.memory.ranks import Mark, Model, Step
from ds_seqpar.whole import plain
from hf_integration import patch_attention, share_sequences

PLAIN, GATHERING, PARTS, SHARED = "trl plain, 1 rank", "whole logits gathered", "in parts", "in parts, shared prompts"
IGNORE, CLIP, BETA = -100, 0.2, 0.1
# a head's outputs, including those that trl's trainer logs
OUTPUTS = {"dpo": ("log_probs", "entropy", "mean_logits", "is_top1"), "grpo": ("log_probs", "entropy")}


Shape = tuple[int, int, int, int]  # (rows, tokens per row, tokens of the completion, tokens of a tile of the head)


def made(model: Model, task: str, kind: str, shape: Shape) -> Step:
    """Return a training step. Ranks sum gradients.

    The policy (and, for DPO, a reference model) computes a log-probability per token for the loss.
    """
    chunked_logprob.TOKEN_CHUNK_SIZE = shape[3]
    policy, ids = model.make(), rows(model, shape)
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    models = [policy]
    if task == "dpo":
        models.append(model.make().eval().requires_grad_(False))
        models[1].lm_head.weight.data.mul_(1.1)  # otherwise, all margins are 0
    for one in models:
        add_fused_lm_head(one, outputs=OUTPUTS[task] if one is policy else ("log_probs",))
    if kind != PLAIN:
        sp = share_sequences(policy, size=dist.get_world_size(), shared_prompts=kind == SHARED)
        for one in models[1:]:
            patch_attention(one, sp)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    labels = ids.clone()
    labels[:, : -shape[2]] = IGNORE

    def numbers(of: Any) -> Tensor:
        if kind != GATHERING:
            return plain(of(input_ids=ids, labels=labels, fused_lm_head=True, use_cache=False).log_probs)
        logits = plain(of(input_ids=ids, use_cache=False).logits)[:, :-1]
        return selective_log_softmax(logits, ids[:, 1:]).masked_fill(labels[:, 1:] == IGNORE, 0)

    def step(mark: Mark = lambda _: None) -> tuple[float, float]:
        logps = numbers(policy)
        with torch.no_grad():
            others = [numbers(one) for one in models[1:]]
        loss = LOSSES[task](logps, *others)
        loss.backward()
        norm = averaged(policy)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm

    return step


def rows(model: Model, shape: Shape) -> Tensor:
    """Return rows with the same prompt."""
    count, tokens, completion, _ = shape
    ids = model.tokens(tokens).repeat(count, 1)
    ids[:, -completion:] = torch.randint(model.vocab, (count, completion), generator=torch.Generator().manual_seed(2))
    return ids


def dpo(logps: Tensor, reference: Tensor) -> Tensor:
    scores = (logps - reference).sum(1)
    return -F.logsigmoid(BETA * (scores[0] - scores[1]))


def grpo(logps: Tensor) -> Tensor:
    advantages = torch.linspace(-1, 1, len(logps))[:, None]
    ratio = (logps - logps.detach()).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return (logps.detach() - gain).mean()  # the first term only makes differences between contenders visible


LOSSES: dict[str, Any] = {"dpo": dpo, "grpo": grpo}


def averaged(model: nn.Module) -> float:
    """Average gradients over ranks, and return their norm."""
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return float(torch.linalg.vector_norm(torch.stack([x.norm() for x in gradients])))
