"""GRPO without trl, in a custom loop whose ranks share sequences. The output is the same on 1 or 2 ranks:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/grpo_loop.py --size 2

A prompt is a number, such as "1 7 =", and its completion is four digits. The reward is 1 if the digits add up to the
number, and decreases with the error. A small, randomly initialized LLaMA learns the task within a minute.

For sampling, the ranks of a group divide the completions among themselves; then they train on all completions together.
Each completion has its own noise, so the result does not depend on which rank samples the completion.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from ds_seqpar import SequenceParallel
from hf_integration import share_sequences, whole_sequences

# prompts per step, completions per prompt, tokens of both, a token id, PPO's clip
PROMPTS, SAMPLES, PROMPT, NEW, EQUALS, CLIP = 8, 8, 3, 4, 10, 0.2


def reward_of(prompts: Tensor, completions: Tensor) -> Tensor:
    asked = 10 * prompts[:, 0] + prompts[:, 1]
    missed = (completions.clamp(max=9).sum(1) - asked).abs() + 9 * (completions == EQUALS).sum(1)
    return (1 - missed / 18).clamp(min=0)


def sampled(policy: LlamaForCausalLM, sp: SequenceParallel, prompts: Tensor, noise: Tensor) -> Tensor:
    """Return completions of all prompts; each rank of the group samples some of them."""
    mine = torch.arange(len(prompts)).chunk(sp.size)[sp.rank]

    def draw(ids: Tensor, scores: Tensor) -> Tensor:
        return scores + noise[mine, ids.shape[1] - PROMPT]  # the maximum is a sample

    completions = torch.zeros_like(noise[..., 0], dtype=torch.int64)
    with torch.no_grad(), whole_sequences(policy):
        ids = policy.generate(prompts[mine], max_new_tokens=NEW, do_sample=False, logits_processor=[draw])
    completions[mine] = ids[:, PROMPT:]
    return sp.sum_over_ranks(completions)


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
        prompts = torch.cat([asked // 10, asked % 10, torch.full_like(asked, EQUALS)], 1)
        prompts = prompts.repeat_interleave(SAMPLES, 0).to(sp.device)
        noise = -torch.empty(len(prompts), NEW, 11).exponential_().log().to(sp.device)
        ids = torch.cat([prompts, sampled(policy, sp, prompts, noise)], 1)
        labels = ids.index_fill(1, torch.arange(PROMPT, device=sp.device), -100)
        reward = reward_of(prompts, ids[:, PROMPT:]).view(PROMPTS, SAMPLES)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        for update in range(2):  # two updates on the same completions
            logps = sp.log_probs(model, ids, labels=labels)[:, -NEW:]
            if update == 0:
                old = logps.detach()
            ratio, gain = (logps - old).exp(), advantage.view(-1, 1)
            loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            mean, right = reward.mean().item(), (reward == 1).float().mean().item()
            print(f"step {step:3}: reward {mean:.4f} right {right:.4f} {'#' * round(50 * mean)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
