"""Time layers other than attention on a simulated cluster, with several contenders that take turns.

    python -m benchmarks.cluster.layers --nodes 8 --link 50mbit --layer delta --seq 4096 -- \
        u8+recurrent_layers=heads ring+recurrent_layers=states

Nodes, links, contenders, turns and the table are the same as in `cluster.attention`. A call runs forward and backward.

--layer selects the layer:

- delta: a gated delta rule as in Qwen3-Next, with twice as many value heads as key heads.
- decay: Mamba-2, with one group of keys for eight heads.

Both run transformers' own functions for CPUs, in chunks of 64 tokens.

Each contender is first compared with the same layer in one process. "MiB" is the peak memory of tensors that a rank
allocates during a call. "counted MB" is the maximum over ranks of the bytes that a rank has counted as received.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from benchmarks import runner
from benchmarks.attention import peers
from benchmarks.contenders import Spec
from benchmarks.runner import Row, Step
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from hf_integration import mixers

Layer = Callable[..., Tensor]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or the words in `given`."""
    its = runner.parser(
        __doc__, "u8+recurrent_layers=heads", "ring+recurrent_layers=states", nodes=8, per_node=1, link="50mbit",
        layer=(*LAYERS,), seq=4096, heads=16, head_dim=64, rounds=5,
    )  # fmt: skip
    return runner.checked(its, given)


def measure(args: argparse.Namespace) -> list[Row]:
    return runner.measure(args, reference(args), build)


def delta(args: argparse.Namespace) -> tuple[dict[str, Tensor], Layer]:
    groups, dim = args.heads // 2, args.head_dim
    inputs = {"v": _random(args, args.heads, dim), "q": _random(args, groups, dim), "k": _random(args, groups, dim)}
    inputs |= {"g": -_random(args, args.heads).abs() / 8, "beta": _random(args, args.heads).sigmoid()}

    def of_values(call: Layer, v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return call(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return inputs, _seam("torch_chunk_gated_delta_rule", torch_chunk_gated_delta_rule, of_values)


def decay(args: argparse.Namespace) -> tuple[dict[str, Tensor], Layer]:
    groups, dim = max(1, args.heads // 8), args.head_dim
    inputs = {"x": _random(args, args.heads, dim), "dt": _random(args, args.heads).abs() / 8}
    inputs |= {"keys": _random(args, groups, dim) / 8, "readout": _random(args, groups, dim) / 8}

    def of_inputs(call: Layer, x: Tensor, dt: Tensor, keys: Tensor, readout: Tensor) -> Tensor:
        return call(x, dt, x.new_full((x.shape[2],), -1.0), keys, readout, 64)

    return inputs, _seam("mamba2_chunk_scan", mamba2_chunk_scan, of_inputs)


LAYERS = {"delta": delta, "decay": decay}


def _random(args: argparse.Namespace, *shape: int) -> Tensor:
    return torch.randn(1, args.seq, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def _seam(name: str, function: Layer, layer: Layer) -> Layer:
    """Return a layer that calls a function of transformers directly, or over the ranks of a SequenceParallel."""

    def run(sp: SequenceParallel | None, *inputs: Tensor) -> Tensor:
        if sp is None:
            return layer(function, *inputs)
        engine = mixers._Shared(sp.runtime, None)
        return layer(lambda *args, **kwargs: mixers.SEAMS[name](engine, function, *args, **kwargs), *inputs)

    return run


def reference(args: argparse.Namespace) -> dict[str, Any]:
    """Return the inputs, the output's gradient, and the fp32 results of one process."""
    named, layer = LAYERS[args.layer](args)
    inputs, whole = [*named.values()], functools.partial(layer, None)
    with torch.no_grad():
        do = torch.randn(whole(*inputs).shape, generator=torch.Generator().manual_seed(2))
    results = dict(zip(("out", *named), peers.step(whole, *inputs, do), strict=True))
    return {"inputs": inputs, "do": do, "results": results}


def build(spec: Spec, args: argparse.Namespace, whole: dict[str, Any]) -> Step:
    config = SequenceParallelConfig.from_dict({"size": dist.get_world_size(), **spec.section})
    sp = SequenceParallel(config, heads=(args.heads, args.heads))
    positions = sp.shard(torch.arange(args.seq), 0)
    held = [x[:, positions].contiguous() for x in (*whole["inputs"], whole["do"])]
    layer = functools.partial(LAYERS[args.layer](args)[1], sp)
    return Step(lambda: peers.step(layer, *held), positions, sp, held)


def title(args: argparse.Namespace) -> str:
    return (
        f"{args.layer}, forward and backward, {args.seq} tokens, "
        f"{args.heads} heads of {args.head_dim}, fp32; median of {args.rounds}"
    )


def table(rows: list[Row], args: argparse.Namespace, link: str) -> str:
    peak: runner.Columns = {"MiB": lambda row: f"{row['peak'] / 2**20:.0f}"}
    counted: runner.Columns = {"counted MB": lambda row: f"{row['counted'] / 1e6:.2f}"}
    return runner.report(rows, args, link, {**runner.TIMES, **peak}, {**runner.SENT, **counted, **runner.SHARE})


def main() -> None:
    runner.main(arguments, measure, title, table)


if __name__ == "__main__":
    main()
