"""What ranks of a launcher do for test_quantized.py: torchrun qlora_runs.py FOLDER writes what rank 0 found as
FOLDER/RANKS.json."""

import json
import sys
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.hf import trainers
from tests.hf.every_type import tiny
from tests.hf.llama import small

# by ranks: (size, ZeRO's stage, tiles and checkpoints); size None: the plain Trainer
CASES = {1: [(None, 2, {})], 2: [(2, 2, {"mlp_tiles": 2, "loss_tiles": 2}), (2, 3, {})]}
# the library's kernels of evaluation on CPUs take sizes that 32 divides
SIZES = {"hidden_size": 256, "intermediate_size": 128}
MODELS = {"llama": lambda: small(pad_token_id=0, **SIZES), "deepseek_v32": lambda: tiny("deepseek_v32")}


def logs(folder, name, size, stage, tiles):
    args = trainers.arguments(folder, 2, size and {"size": size, **tiles}, stage, max_steps=2)  # ZeRO-3 from here on
    bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    if stage == 3:
        bits["bnb_4bit_quant_storage"] = torch.float32
    config = BitsAndBytesConfig(**bits)
    model = AutoModelForCausalLM.from_pretrained(
        Path(folder).with_name(name), quantization_config=config, dtype=torch.float32
    )
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=bool(tiles))
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    assert type(model.base_model.model.model.layers[0].self_attn.o_proj).__name__ == "Linear4bit"
    kind = trainers.SequenceParallelTrainer if size else trainers.Trainer
    parts = {"train_dataset": trainers.documents(16), "data_collator": trainers.collate}
    return trainers.trained(kind(model, args, **parts)).logs


def main(folder):
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if ranks == 1:
        for name, make in MODELS.items():
            make().save_pretrained(f"{folder}/{name}")
    found = {name: [logs(f"{folder}/{ranks}{i}", name, *x) for i, x in enumerate(CASES[ranks])] for name in MODELS}
    if dist.get_rank() == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
