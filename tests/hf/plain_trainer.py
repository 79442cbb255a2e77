"""Causal language modeling with transformers' Trainer as its documentation shows it: not a word of this project."""

import math
import sys
from itertools import chain

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, LlamaForCausalLM, Trainer, TrainingArguments

text, model_folder, deepspeed_config, output_dir = sys.argv[1:5]
block_size = 64

tokenizer = AutoTokenizer.from_pretrained(model_folder)
model = LlamaForCausalLM.from_pretrained(model_folder)
dataset = load_dataset("text", data_files=text, split="train").train_test_split(test_size=0.2, seed=0)


def tokenize(examples):
    return tokenizer(examples["text"])


def group_texts(examples):
    joined = {name: list(chain(*examples[name])) for name in examples}
    total = len(joined["input_ids"]) // block_size * block_size
    return {name: [ids[i : i + block_size] for i in range(0, total, block_size)] for name, ids in joined.items()}


tokenized = dataset.map(tokenize, batched=True, remove_columns=["text"])
blocks = tokenized.map(group_texts, batched=True)

training_args = TrainingArguments(
    output_dir=output_dir,
    deepspeed=deepspeed_config,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=2,
    learning_rate=1e-3,
    weight_decay=0.01,
    logging_steps=1,
    eval_strategy="epoch",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=blocks["train"],
    eval_dataset=blocks["test"].select(range(8)),
    data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False),
)
trainer.train()
results = trainer.evaluate()
trainer.save_state()
if trainer.is_world_process_zero():
    print(f"Perplexity: {math.exp(results['eval_loss']):.2f}")
