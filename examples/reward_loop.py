"""Train a reward model in a custom loop whose ranks share sequences. The output is the same on 1 or 2 ranks:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/reward_loop.py --size 2

Heads other than a causal language model's receive the whole output of the base model. With these heads, transformers'
ForSequenceClassification returns the score of each row on all ranks that share the row.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from hf_integration import share_sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(0)  # the same model and pairs on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = Qwen2Config(vocab_size=256, num_key_value_heads=2, pad_token_id=0, num_labels=1, **sizes)
    model = Qwen2ForSequenceClassification(config)
    sp = share_sequences(model, size=args.size)
    model = DistributedDataParallel(model.to(sp.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        # in each step, every group uses a different pair: a chosen row, and a shorter, rejected row
        ids = torch.randint(1, 256, (sp.data_size, 2, 96))[sp.data_rank]
        ids[1, 70:] = 0
        scores = model(input_ids=ids.to(sp.device), attention_mask=(ids != 0).long().to(sp.device)).logits
        chosen, rejected = scores.squeeze(1).float()
        loss = -F.logsigmoid(chosen - rejected)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.5f} margin {(chosen - rejected).item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
