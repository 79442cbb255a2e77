"""The part of `benchmarks.memory.peers` that runs on ranks: a contender's training steps on one sequence.

All contenders train the same LLaMA on the same tokens with the same ZeRO-3 settings. `KINDS` has a function for each
kind of contender.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP, UlyssesSPAttentionHF
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import ds_seqpar
from benchmarks.turns import wall
from tests.live import Live

LONGEST = 2**19  # tokens of the text; shorter sequences are prefixes
# for all contenders: small ZeRO buffers, and parameters are released after use
ZERO = {
    "stage": 3,
    "reduce_bucket_size": 2**20,
    "stage3_prefetch_bucket_size": 2**20,
    "stage3_param_persistence_threshold": 2**10,
    "stage3_max_live_parameters": 2**20,
    "stage3_max_reuse_distance": 0,
}
Mark = Callable[[str], None]
Step = Callable[..., tuple[float, float]]  # called with a Mark
Kind = tuple[Any, Callable[[], Tensor], Callable[[Tensor], float]]  # engine, loss of a rank, mean over ranks
OVER = 77  # exit code of a rank that exceeded its limit
# settings of this benchmark; other settings belong to the "sequence_parallel" section
LOCAL = {"checkpointing": True, "tiled_mlp": False, "tile_bytes": 2**26}


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of the model. `zero` overrides settings in the constant ZERO."""

    vocab: int = 131072
    hidden: int = 256
    intermediate: int = 1024
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    bf16: bool = False
    zero: Sequence[tuple[str, Any]] = ()

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=LONGEST, rope_theta=5e5, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip

    def make(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(self.config)

    def tokens(self, seq: int) -> Tensor:
        return torch.randint(self.vocab, (1, LONGEST), generator=torch.Generator().manual_seed(1))[:, :seq].clone()

    def settings(self) -> dict[str, Any]:
        zero = ZERO | dict(self.zero)
        adam = {"torch_adam": "offload_optimizer" not in zero}  # otherwise DeepSpeed's own for CPUs, which it compiles
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **adam}},
            "zero_optimization": zero,
            "bf16": {"enabled": self.bf16},
            "steps_per_print": 10**9,
        }


@dataclasses.dataclass(frozen=True)
class Figures:
    """The measurements of one rank.

    Attributes:
        rest: Resident bytes before the first step.
        rss: Peak resident bytes during a step.
        seconds: Times of the steps.
        losses, norms: Losses and gradient norms of the steps, the same on all ranks.
        allocated: Peak bytes of tensors created in one step, by phase.
    """

    rest: int
    rss: int
    seconds: list[float]
    losses: list[float]
    norms: list[float]
    allocated: dict[str, int]


def measure(make: Callable[[], Step], timed: int, follow: bool, limit: int) -> Figures:
    """Run a warm-up step and `timed` timed steps of the step that `make` creates, and track the tensors of one more
    step if `follow` is set.

    The peak of RSS is reset before each step. The process exits if RSS exceeds `limit` bytes, before the machine runs
    out of memory.
    """
    threading.Thread(target=watch, args=(limit,), daemon=True).start()
    step = make()
    rest, found, seconds, highest = memory("VmRSS"), [], [], 0
    for _ in range(1 + timed):
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # resets VmHWM
        dist.barrier()
        seconds.append(wall(lambda: found.append(step())))
        highest = max(highest, memory("VmHWM"))
    losses, norms = map(list, zip(*found, strict=True))
    return Figures(rest, highest, seconds[1:], losses, norms, followed(step) if follow else {})


def memory(name: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def watch(limit: int) -> None:
    """Exit this process when its RSS exceeds the limit."""
    while memory("VmRSS") < limit:
        time.sleep(0.05)
    os._exit(OVER)


class Followed(Live):
    inside = ("ds_seqpar", "deepspeed")


def tensors() -> list[Tensor]:
    """Return all CPU tensors known to Python."""
    found = [x for x in gc.get_objects() if type.__instancecheck__(Tensor, x)]
    return [x for x in found if x.device.type == "cpu" and x.layout == torch.strided]


def followed(step: Step) -> dict[str, int]:
    """Return the peak bytes of tensors created in one step, by phase."""
    phases: dict[str, int] = {}
    with Followed(*tensors()) as live:

        def mark(phase: str) -> None:
            phases[phase] = live.peak
            live.restart()

        step(mark)
    return phases


def made(model: Model, kind: str, options: dict[str, Any], seq: int) -> Step:
    """Return a contender's step, which returns the loss and gradient norm of the whole batch. Call once per process."""
    local, section = divided(options, seq)
    if local["tiled_mlp"]:
        modeling_llama.LlamaMLP.forward = tiled_mlp
    llama = model.make().train()
    if local["checkpointing"]:
        llama.gradient_checkpointing_enable({"use_reentrant": kind != "ours"})
    engine, forward, mean = KINDS[kind](model, llama, local, section, seq)

    def step(mark: Mark = lambda _: None) -> tuple[float, float]:
        loss = forward()
        mark("forward")
        engine.backward(loss)
        mark("backward")
        engine.step()
        mark("step")
        return mean(loss), float(engine.get_global_grad_norm())

    return step


def divided(options: dict[str, Any], seq: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into the benchmark's own settings and the section, adding the length if "memory" is "auto"."""
    local = {name: options.get(name, default) for name, default in LOCAL.items()}
    section = {name: value for name, value in options.items() if name not in LOCAL}
    return local, {"seq_len": seq, **section} if section.get("memory") == "auto" else section


def plain(model: Model, llama: Any, local: dict[str, Any], section: dict[str, Any], seq: int) -> Kind:
    """Create an engine that trains on the same whole sequence on every rank, so that ranks share only states."""
    engine = deepspeed.initialize(model=llama, model_parameters=llama.parameters(), config=model.settings())[0]
    ids = model.tokens(seq).to(engine.device)
    return engine, lambda: engine(input_ids=ids, labels=ids, use_cache=False).loss, Tensor.item


def ours(model: Model, llama: Any, local: dict[str, Any], section: dict[str, Any], seq: int) -> Kind:
    config = model.settings() | {"sequence_parallel": {"size": dist.get_world_size(), **section}}
    engine = ds_seqpar.initialize(model=llama, model_parameters=list(llama.parameters()), config=config)[0]
    sp, ids = engine.sequence_parallel, model.tokens(seq)

    def forward() -> Tensor:
        (batch,) = sp.shard_batches([{"input_ids": ids, "labels": ids}], device=engine.device)
        return engine(**batch).loss

    return engine, forward, lambda loss: sp.mean_loss([loss])


def alst(model: Model, llama: Any, local: dict[str, Any], section: dict[str, Any], seq: int) -> Kind:
    """Create DeepSpeed's Ulysses with its recipe for long sequences (Arctic Long Sequence Training, arXiv:2506.13996).

    The setup follows DeepSpeed's tutorial, with tiled MLPs, tiled logits and losses, and reentrant checkpointing.
    Tokens are sharded by hand in the same way as UlyssesSPDataLoaderAdapter. `tile_bytes` is the size of fp32 logits
    per tile; the recipe's own 1 GiB is meant for GPUs.

    TiledFusedLogitsLoss computes the gradient of lm_head's weight during forward, so the loss is divided inside the
    tiles.
    """
    deepspeed.init_distributed()
    world, rank = dist.get_world_size(), dist.get_rank()
    share = (seq - 1) / world
    tiles = math.ceil(seq // world * model.vocab * 4 / local["tile_bytes"])

    def tile(head: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = head.lm_head(hidden).float()
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / share

    def inner(**inputs: Tensor) -> Tensor:
        hidden = llama.model(**inputs, use_cache=False).last_hidden_state
        return TiledFusedLogitsLoss.apply(tile, llama, hidden, labels, None, tiles, [llama.lm_head.weight], "sum")

    mpu = UlyssesSPAttentionHF.register_with_transformers(
        llama, "sdpa", sequence_parallel_size=world, micro_batch_size=1, seq_length_is_variable=True
    )
    llama.forward = inner  # must be called by the engine, so that ZeRO-3 can record the order of parameters
    config = model.settings() | {"sequence_parallel_size": world}
    engine = deepspeed.initialize(model=llama, model_parameters=llama.parameters(), config=config, mpu=mpu)[0]
    group = deepspeed.utils.groups._get_sequence_parallel_group()
    ids, here = model.tokens(seq), slice(rank * seq // world, (rank + 1) * seq // world)
    shifted = F.pad(ids, (0, 1), value=-100)[:, 1:]
    whole = {"input_ids": ids, "position_ids": torch.arange(seq)[None], "labels": shifted}
    batch = {name: x[:, here].contiguous().to(engine.device) for name, x in whole.items()}
    labels = batch.pop("labels")

    def forward() -> Tensor:
        return torch.stack(torch.distributed.nn.functional.all_gather(engine(**batch), group=group)).mean()

    return engine, forward, Tensor.item


KINDS = {"plain": plain, "deepspeed": alst, "ours": ours}


def tiled_mlp(self: Any, x: Tensor) -> Tensor:
    """Compute LlamaMLP.forward in tiles of about `hidden` tokens."""
    weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
    return TiledMLP.apply(_mlp, self, x, math.ceil(x.shape[1] / x.shape[2]), weights)


def _mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
