"""DPO without trl, in a custom loop whose ranks share sequences. Up to rounding, the output is the same on 1 or 2
ranks:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/dpo_loop.py --size 2

A small LLaMA first learns to add two digits from a teacher that is wrong half of the time. Training then continues on
pairs of a right and a wrong answer, so that the model learns to prefer right answers. Each step prints the share of
correct answers over all 100 additions, and how much more the model prefers right answers than the initial model does.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hf_integration import share_sequences

PROMPT, PAIRS, BETA, PLUS, EQUALS = 4, 64, 0.3, 19, 20  # tokens of a prompt, a step's pairs, DPO's beta, two token ids
PROBLEMS = torch.cartesian_prod(torch.arange(10), torch.arange(10))


def rows_of(problems: Tensor, answers: Tensor) -> Tensor:
    """Return the tokens of `a + b = answer`, (problems, 5)."""
    signs = [torch.full_like(answers, sign) for sign in (PLUS, EQUALS)]
    return torch.stack([problems[:, 0], signs[0], problems[:, 1], signs[1], answers], 1)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Draw problems, each with a right and a wrong answer."""
    problems = PROBLEMS[torch.randint(0, len(PROBLEMS), (PAIRS,))]
    right = problems.sum(1)
    return problems, right, (right + torch.randint(1, 19, right.shape)) % 19


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=100, help="steps with the teacher")
    args = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(0)  # the same model on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=21, **sizes))
    sp = share_sequences(policy, size=args.size)
    model = DistributedDataParallel(policy.to(sp.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def answers_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
        """Return the log-probability of each row's answer."""
        labels = ids.index_fill(1, torch.arange(PROMPT), -100)
        return sp.log_probs(model, ids.to(sp.device), labels=labels.to(sp.device)).sum(1)

    def step_with(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1 + sp.data_rank)  # the same problems on the ranks of a group
    for _ in range(args.warm_up):
        problems, right, wrong = drawn()
        step_with(-answers_of(model, rows_of(problems, torch.where(torch.rand(PAIRS) < 0.5, right, wrong))).mean())
    reference = copy.deepcopy(policy).eval()
    for step in range(args.steps):
        problems, right, wrong = drawn()
        ids = torch.cat([rows_of(problems, right), rows_of(problems, wrong)])
        with torch.no_grad():
            before = answers_of(reference, ids)
            all_rows = rows_of(PROBLEMS, PROBLEMS.sum(1)).to(sp.device)
            best = policy(input_ids=all_rows, use_cache=False).logits[:, PROMPT - 1 : -1].argmax(-1)
            accuracy = (best == all_rows[:, PROMPT:]).all(1).float().mean().item()
        chosen, rejected = (answers_of(model, ids) - before).chunk(2)
        step_with(-F.logsigmoid(BETA * (chosen - rejected)).mean())
        if dist.get_rank() == 0:
            margin = (chosen - rejected).mean().item()
            print(f"step {step:3}: right {accuracy:.4f} margin {margin:8.4f} {'#' * round(50 * accuracy)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
