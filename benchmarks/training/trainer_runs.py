"""The Trainer beside the plain Trainer, on the same sequences: how far losses, norms and evaluation losses differ.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.training.trainer_runs --stage 3

Ragged documents, labels that do not all count, two micro-steps, AdamW, clipping, an evaluation every four steps. All
take four sequences a micro-step: the plain Trainer one a rank, `size` 4 all four with all ranks. Printed: the greatest
|a - b| / |b| over the run.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from benchmarks import tables
from hf_integration import SequenceParallelTrainer


def documents(count, longest, seed):
    """Documents that count up, the first labels of each without effect."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(longest // 4, longest + 1, (1,), generator=generator))
        ids = (int(torch.randint(1, 64, (1,), generator=generator)) + torch.arange(length)) % 63 + 1
        labels = ids.clone()
        labels[: int(torch.randint(0, length, (1,), generator=generator))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def collate(examples):
    ids, labels = ([example[name] for example in examples] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def run(args, size):
    """(losses, norms, evaluation losses). size None: the plain Trainer."""
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": args.stage},
        "bf16": {"enabled": args.bf16},
        **({"sequence_parallel": {"size": size}} if size else {}),
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=args.longest, pad_token_id=0,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = (SequenceParallelTrainer if size else Trainer)(
            model,
            TrainingArguments(
                folder, deepspeed=settings, per_device_train_batch_size=size or 1, per_device_eval_batch_size=size or 1,
                gradient_accumulation_steps=2, max_steps=args.steps, learning_rate=3e-3, logging_steps=1,
                eval_strategy="steps", eval_steps=4, save_strategy="no", report_to="none", disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(), bf16=args.bf16, log_level="error",
            ),
            train_dataset=documents(96, args.longest, 1), eval_dataset=documents(12, args.longest, 2),
            data_collator=collate,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = trainer.state.log_history
    return [[entry[name] for entry in logs if name in entry] for name in ("loss", "grad_norm", "eval_loss")]


def difference(found, plain):
    return max(abs(a - b) / abs(b) for a, b in zip(found, plain, strict=True))


def main():
    parser = tables.parser(__doc__)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest document")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) != 4:
        raise SystemExit("start it on 4 ranks: torchrun --nproc-per-node 4 -m benchmarks.training.trainer_runs")
    plain = run(args, None)
    shared = {size: run(args, size) for size in (1, 2, 4)}
    if dist.get_rank() == 0:
        print("\n" + tables.head("size", "loss", "grad_norm", "eval_loss"))
        for size, found in shared.items():
            tables.row(size, *(f"{difference(a, b):.0e}" for a, b in zip(found, plain, strict=True)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
