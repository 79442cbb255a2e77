"""GRPO without trl, in a loop in which ranks share each sequence. It prints the same numbers on 1 rank and on 2:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/grpo_loop.py --size 2

A prompt is a number, such as "1 7 =", and its completion is four digits. The reward is 1 where they add up to the number,
and less the farther off they are. A small LLaMA begins at random and learns it in half a minute.

The ranks of a group divide the completions among them for sampling, then train on all of them together. Each completion
has noise of its own, so that it is the same whichever rank samples it.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hf_integration import share_sequences, whole_sequences

PROMPTS, SAMPLES, NEW, CLIP, EQUALS = 8, 8, 4, 0.2, 10  # a step's prompts, completions of each, their tokens, PPO's clip


def reward_of(prompts: Tensor, completions: Tensor) -> Tensor:
    asked = 10 * prompts[:, 0] + prompts[:, 1]
    missed = (completions.clamp(max=9).sum(1) - asked).abs() + 9 * (completions == EQUALS).sum(1)
    return (1 - missed / 18).clamp(min=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(0)  # the same model on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=11, eos_token_id=None, **sizes))
    sp = share_sequences(policy, size=args.size)
    model = DistributedDataParallel(policy.to(sp.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        torch.manual_seed(1000 * step + sp.data_rank)  # the same prompts and noise on all ranks of a group
        asked = torch.randint(0, 37, (PROMPTS, 1))
        prompts = torch.cat([asked // 10, asked % 10, torch.full_like(asked, EQUALS)], 1).repeat_interleave(SAMPLES, 0)
        noise = -torch.empty(len(prompts), NEW, 11).exponential_().log().to(sp.device)  # argmax with it samples
        mine = torch.arange(len(prompts)).chunk(sp.size)[sp.rank]
        sampled = torch.zeros(len(prompts), NEW, dtype=torch.int64, device=sp.device)
        with torch.no_grad(), whole_sequences(model):
            draw = [lambda ids, scores: scores + noise[mine, ids.shape[1] - prompts.shape[1]]]
            ids = policy.generate(prompts[mine].to(sp.device), max_new_tokens=NEW, do_sample=False, logits_processor=draw)
            sampled[mine] = ids[:, prompts.shape[1] :]
        completions = sp.sum_over_ranks(sampled)
        ids = torch.cat([prompts.to(sp.device), completions], 1)
        labels = ids.clone()
        labels[:, : prompts.shape[1]] = -100
        reward = reward_of(prompts.to(sp.device), completions).view(PROMPTS, SAMPLES)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        old = None
        for _ in range(2):  # updates on the same completions
            logps = sp.log_probs(model, ids, labels=labels)[:, -NEW:]
            old = logps.detach() if old is None else old
            ratio, gain = (logps - old).exp(), advantage.view(-1, 1)
            loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            mean = reward.mean().item()
            print(f"step {step:3}: reward {mean:.4f} loss {loss.item():8.5f} {'#' * round(50 * mean)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
