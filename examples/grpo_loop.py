"""GRPO in a custom training loop in which ranks share each sequence. It prints the same numbers on 1 rank and on 2:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/grpo_loop.py --size 2

Ranks that share sequences sample completions together, with the seed of their group. The model then takes whole
completions and returns whole log-probabilities, from which any loss can be computed.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hf_integration import share_sequences

SAMPLES, PROMPT, NEW, CLIP, BETA = 4, 8, 56, 0.2, 0.04  # completions of a prompt, tokens, PPO's clip, KL weight


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same model on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, eos_token_id=None, **sizes))


def logps_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Return the log-probability of each completed token, (samples, NEW): one number for each token is gathered."""
    logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1]
    return logits.float().log_softmax(-1).gather(2, ids[:, PROMPT:, None]).squeeze(2)


def reward_of(ids: Tensor) -> Tensor:
    """Return the share of even completed tokens, (samples,). It stands in for a verifier or a reward model."""
    return (ids[:, PROMPT:] % 2 == 0).float().mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group()
    policy, reference = small_llama(), small_llama().eval()
    sp = share_sequences(policy, size=args.size)
    reference.patch_attention(sp)
    model = DistributedDataParallel(policy.to(sp.device))
    reference.to(sp.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        torch.manual_seed(1000 * step + sp.data_rank)  # one seed for each group: its ranks sample the same tokens
        prompt = torch.randint(0, 256, (1, PROMPT)).repeat(SAMPLES, 1).to(sp.device)
        with torch.no_grad():
            ids = policy.generate(prompt, do_sample=True, max_new_tokens=NEW, min_new_tokens=NEW)
            old_logps, reference_logps = logps_of(policy, ids), logps_of(reference, ids)
        reward = reward_of(ids)
        advantage = ((reward - reward.mean()) / (reward.std() + 1e-4))[:, None]
        for _ in range(2):  # updates on the same completions
            logps = logps_of(model, ids)
            ratio = (logps - old_logps).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            kl = (reference_logps - logps).exp() - (reference_logps - logps) - 1
            loss = (BETA * kl - gain).mean()  # the same on all ranks of a group
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: reward {reward.mean():.4f} loss {loss.item():.5f} kl {kl.mean().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
