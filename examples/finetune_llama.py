"""Train a LLaMA on long sequences, each split across several ranks.

    deepspeed --num_gpus 4 examples/finetune_llama.py --deepspeed_config ds_configs/demo.json

By default, the script trains a small, randomly initialized LLaMA with GQA on the sources of the Python standard
library, with bytes as tokens. The folder --out receives the model in the format of `from_pretrained`, the loss curve,
and a log with one line per step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

if "OMP_NUM_THREADS" not in os.environ:  # before importing torch; otherwise, every rank starts a thread per core
    ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks_here))

import deepspeed
import matplotlib
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import ds_seqpar
from ds_seqpar.deepspeed.config import DeepSpeedJson
from ds_seqpar.engine import start

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, help="DeepSpeed JSON with a sequence_parallel section")
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="text file or folder")
    parser.add_argument("--model", type=Path, help="a local HuggingFace LLaMA folder; default: a small new one")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a sequence, over all its ranks")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--eval-sequences", type=int, default=4, help="held-out sequences")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_llama"))
    parser.add_argument("--gradient-checkpointing", action="store_true", help="keep layer inputs only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args()


def load_tokenizer(folder: Path | None) -> object:
    """Return the tokenizer of the model folder, or a byte tokenizer."""
    return AutoTokenizer.from_pretrained(folder) if folder else ByT5Tokenizer(extra_ids=0)


def load_model(args: argparse.Namespace, vocab_size: int) -> LlamaForCausalLM:
    """Load the model in a folder, or create a small model that is identical on every rank.

    With ZeRO-3, no rank loads the whole model.
    """
    torch.manual_seed(args.seed)
    if args.model is None:
        config = LlamaConfig(
            vocab_size=vocab_size, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=args.seq_len,
        )  # fmt: skip
        return LlamaForCausalLM(config)
    given, partitioned = DeepSpeedJson.read(args.deepspeed_config), None
    if given.known.zero_optimization.stage == 3:
        needed = {"zero_optimization": given.content["zero_optimization"], "train_micro_batch_size_per_gpu": 1}
        partitioned = HfDeepSpeedConfig(needed)  # from_pretrained checks whether one is alive
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16 if given.known.dtype == "bfloat16" else torch.float32
    )
    del partitioned
    return model


def read_tokens(data: Path, tokenizer: object, count: int, seed: int) -> torch.Tensor:
    """Read `count` tokens from files, in the same order on every rank. Tokens are repeated if there are too few."""
    files = [data] if data.is_file() else sorted(p for p in data.rglob("*") if p.suffix in (".py", ".txt", ".md"))
    if not files:
        raise SystemExit(f"--data needs a text file or a folder with .py, .txt or .md files; got {data}")
    random.Random(seed).shuffle(files)
    ids: list[int] = []
    for file in files:
        ids += tokenizer(file.read_text(encoding="utf-8", errors="replace"), add_special_tokens=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
        if len(ids) >= count:
            break
    if len(ids) < 2:
        raise SystemExit(f"--data needs some text; {data} has none")
    return torch.tensor(ids).repeat(-(-count // len(ids)))[:count]


def windows(tokens: torch.Tensor, sp: ds_seqpar.SequenceParallel, micro: int, steps: int) -> Iterator[list[dict]]:
    """Yield the micro-batches of each step of this rank's data group, forever. `tokens` is (sequences, seq_len)."""
    number = 0
    while True:
        microbatches = []
        for _ in range(steps):
            first = (number * sp.data_size + sp.data_rank) * micro
            ids = tokens[[(first + i) % len(tokens) for i in range(micro)]]
            microbatches.append({"input_ids": ids, "labels": ids.clone()})
            number += 1
        yield microbatches


def evaluate(engine: deepspeed.DeepSpeedEngine, sp: ds_seqpar.SequenceParallel, tokens: torch.Tensor) -> float:
    """Return the mean token loss of held-out sequences, all of which every data group evaluates."""
    engine.eval()
    batches = [{"input_ids": ids[None], "labels": ids[None].clone()} for ids in tokens]
    with torch.no_grad():
        shards = sp.shard_batches(batches, training=False, device=engine.device)
        losses = [engine(**shard).loss for shard in shards]
    engine.train()
    return sp.mean_loss(losses)


def train(
    engine: deepspeed.DeepSpeedEngine,
    sp: ds_seqpar.SequenceParallel,
    data: Iterator[list[dict]],
    steps: int,
    file: Path,
) -> list[float]:
    """Train for some steps, log a line per step to `file`, and return the losses."""
    first = dist.get_rank() == 0
    losses, bar = [], tqdm(range(steps), disable=not first, desc="train", unit="step", mininterval=1.0)
    with open(file if first else os.devnull, "w", encoding="utf-8") as log:
        for step in bar:
            began, shard_losses, tokens = time.perf_counter(), [], 0
            microbatches = next(data)
            for batch in sp.shard_batches(microbatches, device=engine.device):
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                shard_losses.append(loss)
                tokens += batch["input_ids"].numel() * dist.get_world_size()
            # each rank's loss covers only its shard; the step's loss is the mean over ranks
            losses.append(sp.mean_loss(shard_losses))
            norm, speed = float(engine.get_global_grad_norm() or 0.0), tokens / (time.perf_counter() - began)
            bar.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{speed:.0f}")
            log.write(json.dumps({"step": step, "loss": losses[-1], "grad_norm": norm, "tokens_per_s": speed}) + "\n")
    return losses


def save_model(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Save the model for from_pretrained. Under ZeRO-3, one parameter at a time is gathered on the first rank's CPU."""
    state = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.get_rank() == 0:
                state[name] = parameter.detach().cpu().clone()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state)
    dist.barrier()


def draw(losses: list[float], before: float, after: float, file: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, label="training")
    axes.plot([0, len(losses)], [before, after], "o", label="held out")
    axes.set(xlabel="optimizer step", ylabel="loss (nats a token)", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # from DeepSpeed's calls
    args = arguments()
    tokenizer = load_tokenizer(args.model)
    start()  # torch.distributed
    model = load_model(args, len(tokenizer))
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = ds_seqpar.initialize(
        model=model, model_parameters=list(model.parameters()), config=args.deepspeed_config
    )
    sp = engine.sequence_parallel
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    sequences = args.steps * steps * micro * sp.data_size + args.eval_sequences
    tokens = read_tokens(args.data, tokenizer, sequences * args.seq_len, args.seed).view(sequences, args.seq_len)
    tokens = tokens[torch.randperm(sequences, generator=torch.Generator().manual_seed(args.seed))]
    held_out, training = tokens[: args.eval_sequences], tokens[args.eval_sequences :]

    args.out.mkdir(parents=True, exist_ok=True)
    before = evaluate(engine, sp, held_out)
    began = time.perf_counter()
    losses = train(engine, sp, windows(training, sp, micro, steps), args.steps, args.out / "log.jsonl")
    seconds = time.perf_counter() - began
    after = evaluate(engine, sp, held_out)
    save_model(engine, args.out / "model")
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(args.out / "model")
        draw(losses, before, after, args.out / "loss.png")
        shape = f"ulysses {sp.config.ulysses} x {sp.config.schedule} {sp.size // sp.config.ulysses}"
        zero = f"ZeRO-{engine.zero_optimization_stage()}"
        print(f"\n{sp.size} ranks a sequence: {shape}, {sp.config.layout} layout, {zero}")
        print(f"training loss {losses[0]:.3f} -> {losses[-1]:.3f}, held-out loss {before:.3f} -> {after:.3f}")
        print(f"{training.numel() / seconds:.0f} tokens/s; wrote {args.out}/model, loss.png and log.jsonl")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
