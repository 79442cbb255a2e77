"""Fine-tune a model with the HuggingFace Trainer, with each document split across several ranks.

    deepspeed --num_gpus 4 examples/finetune_trainer.py --deepspeed ds_configs/zero3_sp4.json

    accelerate launch --use_deepspeed --deepspeed_config_file ds_configs/zero3_sp4.json --num_processes 4 \
        examples/finetune_trainer.py

The script accepts all of transformers' TrainingArguments as options. By default, a small, randomly initialized LLaMA is
trained on the sources of the Python standard library, with bytes as tokens and one document per file.

--lora trains adapters instead of the model. --pack concatenates documents instead of padding them, and attention stays
within each document. --resume_from_checkpoint True resumes from the last complete checkpoint in --output_dir, and
--resume_from_checkpoint FOLDER from the given checkpoint. Under torchrun --max-restarts N, a run that has lost a rank
automatically resumes from its last checkpoint.
"""

from __future__ import annotations

import math
import os
import random
import sysconfig
import warnings
from dataclasses import dataclass, field
from pathlib import Path

if "OMP_NUM_THREADS" not in os.environ:  # before importing torch; otherwise, every rank starts a thread per core
    ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks_here))

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

from hf_integration import PackingCollator, Packs, SequenceParallelTrainer


@dataclass
class Arguments:
    data: str = field(default=sysconfig.get_paths()["stdlib"], metadata={"help": "folder with .py, .txt or .md files"})
    model: str | None = field(default=None, metadata={"help": "a local model folder; default: a small LLaMA"})
    seq_len: int = field(default=2048, metadata={"help": "most tokens of a document, and of a pack"})
    documents: int = field(default=256, metadata={"help": "documents to train on"})
    eval_documents: int = field(default=10, metadata={"help": "held-out documents"})
    lora: bool = field(default=False, metadata={"help": "train low-rank adapters of the attention, with peft"})
    pack: bool = field(default=False, metadata={"help": "lay documents end to end, with binpacking"})


def parse() -> tuple[Arguments, TrainingArguments]:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(
        output_dir="runs/finetune_trainer", max_steps=40, learning_rate=2e-3, logging_steps=5, eval_strategy="steps",
        eval_steps=20, save_steps=20, save_total_limit=2, per_device_train_batch_size=1, per_device_eval_batch_size=1,
        gradient_accumulation_steps=2, report_to="none", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    return parser.parse_args_into_dataclasses()


def load_model(args: Arguments, vocab_size: int, pad_token_id: int) -> PreTrainedModel:
    """Load the model in a folder, or create a small model that is identical on every rank.

    With ZeRO-3, no rank loads the whole model.
    """
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=args.seq_len, pad_token_id=pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_adapters(model: PreTrainedModel) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model  # needed with --lora only

    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def read_documents(args: Arguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> Dataset:
    """Read a document of up to seq_len tokens from each file, in the same order on every rank."""
    files = sorted(p for p in Path(args.data).rglob("*") if p.suffix in (".py", ".txt", ".md") and p.stat().st_size)
    count = args.documents + args.eval_documents
    if len(files) < count:
        raise SystemExit(f"--data needs {count} files that are not empty (.py, .txt, .md); got {len(files)}")
    random.Random(seed).shuffle(files)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files[:count]]
    return Dataset.from_list([tokenizer(text, truncation=True, max_length=args.seq_len) for text in texts])


def laid_out(args: Arguments, documents: Dataset) -> Dataset | Packs:
    return Packs(documents, args.seq_len) if args.pack else documents


def checkpoint_to_resume(training: TrainingArguments) -> str | None:
    """Return the checkpoint requested by the user or, after a restart by torchrun, the last checkpoint if any."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    has_saved = any(Path(training.output_dir).glob("checkpoint-*"))
    return "last" if restarted and has_saved else training.resume_from_checkpoint


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # from DeepSpeed's calls
    args, training = parse()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else ByT5Tokenizer(extra_ids=0)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = load_model(args, len(tokenizer), tokenizer.pad_token_id)
    documents = read_documents(args, tokenizer, training.seed)
    trainer = SequenceParallelTrainer(
        model=with_adapters(model) if args.lora else model,
        args=training,
        train_dataset=laid_out(args, documents.select(range(args.eval_documents, len(documents)))),
        eval_dataset=laid_out(args, documents.select(range(args.eval_documents))),
        data_collator=PackingCollator() if args.pack else DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(training))
    trainer.save_model()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"held-out loss {metrics['eval_loss']:.3f}, perplexity {math.exp(metrics['eval_loss']):.1f}")
        print(f"wrote {training.output_dir}")
    trainer.end()


if __name__ == "__main__":
    main()
