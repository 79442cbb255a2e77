"""Time layers other than attention on a simulated cluster, with several contenders that take turns.

    python -m benchmarks.cluster.layers --nodes 8 --link 50mbit --layer delta --seq 4096 -- \
        u8+recurrent_layers=heads ring+recurrent_layers=states
    python -m benchmarks.cluster.layers --nodes 8 --link 50mbit --layer latent -- ring+latent_attention=latent \
        ring+latent_attention=expanded

Nodes, links, contenders, turns and the table are the same as in `cluster.attention`. A call runs forward and backward.

--layer selects the layer:

- delta: a gated delta rule as in Qwen3-Next, with twice as many value heads as key heads.
- decay: Mamba-2, with one group of keys for eight heads.
- latent: attention with the proportions of DeepSeek-V3: queries of 1.5 head_dim, and a latent of 4.5 head_dim.

The layers delta and decay run transformers' own functions for CPUs, in chunks of 64 tokens.

Each contender is first compared with the same layer in one process. "MiB" is the peak memory of tensors that a rank
allocates during a call. "counted MB" is the maximum over ranks of the bytes that a rank has counted as received.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from benchmarks import contenders, tables
from benchmarks.attention import peers
from benchmarks.cluster import attention, net
from benchmarks.cluster import ranks as on_ranks
from benchmarks.contenders import Spec
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.base.errors import SeqParError
from hf_integration import mixers
from tests.launch import Ranks
from tests.live import Live

TOLERANCE = 1e-4
CHUNK = 64
DEFAULT = ["u8+recurrent_layers=heads", "ring+recurrent_layers=states"]
COLUMNS = ["contender", "s", "spread", "against first", "MiB", "MB out", "MB in", "counted MB", "share of link"]
Build = Callable[[Spec, argparse.Namespace, str], str | None]


def main() -> None:
    on_ranks.end_by_exit()
    args = arguments()
    print(f"\n{title(args)}\n\n{table(measure(args, reference(args), build), args)}", flush=True)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or the words in `given`."""
    parser = tables.parser(__doc__)
    contenders.add(parser, *DEFAULT)
    on_ranks.options(parser, nodes=8, per_node=1)
    parser.add_argument("--link", type=on_ranks.link, default="50mbit", help="of every node, out and in")
    tables.add(parser, layer=(*LAYERS,), seq=4096, heads=16, head_dim=64, rounds=5)
    return on_ranks.checked(parser, given)


def measure(args: argparse.Namespace, whole: dict[str, Any], build: Build) -> list[dict[str, Any]]:
    """Return a row for each contender, in the given order. Raises RankFailure if a rank fails.

    Args:
        args: The result of `arguments`.
        whole: The contents of the file that ranks read, including the "results" of one process.
        build: Called on each rank to create a contender's step; returns None, or the reason why the contender cannot
            run.
    """
    rows: list[dict[str, Any]] = []
    with net.Network(args.nodes, args.link) as network, on_ranks.started(args, network) as ranks:
        torch.save(whole, Path(ranks.folder.name, "tensors"))
        for spec in args.contenders:
            reason = on_ranks.call(ranks, build, spec, args, ranks.folder.name)[0]
            found = {"cannot": reason} if reason else _prepared(ranks, network, spec, _able(rows))
            rows.append({"name": spec.name, **found})
            tables.say(f"{spec.name}: {rows[-1].get('cannot', 'as in one process')}")
        attention.take_turns(ranks, [row for row in rows if "cannot" not in row], args.rounds)
    return rows


def _able(rows: Sequence[dict[str, Any]]) -> int:
    return sum("cannot" not in row for row in rows)


def _prepared(ranks: Ranks, network: net.Network, spec: Spec, index: int) -> dict[str, Any]:
    error = max(on_ranks.call(ranks, difference, index, ranks.folder.name))
    if not error <= TOLERANCE:
        raise ArithmeticError(
            f"{spec.name} must equal the layer in one process to {TOLERANCE:g}; differs by {error:.1e}"
        )
    before = on_ranks.call(ranks, received, index)
    _, out, into = on_ranks.carried(ranks, network, lambda: on_ranks.turn(ranks, index))
    counted = max(b - a for a, b in zip(before, on_ranks.call(ranks, received, index), strict=True))
    peak = max(on_ranks.call(ranks, most_alive, index))
    return {"error": error, "out": out, "in": into, "counted": counted, "peak": peak}


# ---- layers


Layer = Callable[..., Tensor]


def delta(args: argparse.Namespace) -> tuple[dict[str, Tensor], Layer]:
    groups, dim = args.heads // 2, args.head_dim
    inputs = {"v": _random(args, args.heads, dim), "q": _random(args, groups, dim), "k": _random(args, groups, dim)}
    inputs |= {"g": -_random(args, args.heads).abs() / 8, "beta": _random(args, args.heads).sigmoid()}
    return inputs, _seam("torch_chunk_gated_delta_rule", torch_chunk_gated_delta_rule, _delta)


def _delta(call: Layer, v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return call(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def decay(args: argparse.Namespace) -> tuple[dict[str, Tensor], Layer]:
    groups, dim = max(1, args.heads // 8), args.head_dim
    inputs = {"x": _random(args, args.heads, dim), "dt": _random(args, args.heads).abs() / 8}
    inputs |= {"keys": _random(args, groups, dim) / 8, "readout": _random(args, groups, dim) / 8}
    return inputs, _seam("mamba2_chunk_scan", mamba2_chunk_scan, _decay)


def _decay(call: Layer, x: Tensor, dt: Tensor, keys: Tensor, readout: Tensor) -> Tensor:
    return call(x, dt, x.new_full((x.shape[2],), -1.0), keys, readout, CHUNK)


def latent(args: argparse.Namespace) -> tuple[dict[str, Tensor], Layer]:
    dim, width = args.head_dim, 9 * args.head_dim // 2
    inputs = {"q": _random(args, args.heads, 3 * dim // 2), "latent": _random(args, width)}
    generator = torch.Generator().manual_seed(1)
    expand = torch.randn(args.heads, width, 5 * dim // 2, generator=generator) / width**0.5

    def layer(sp: SequenceParallel | None, q: Tensor, latent: Tensor) -> Tensor:
        matrix = expand.to(q.dtype).requires_grad_()
        if sp is not None:
            return sp.latent_attention(q, latent, matrix)
        k, v = torch.einsum("bsr,hre->bshe", latent, matrix).split([q.shape[-1], dim], -1)
        return peers.dense(q, k, v)

    return inputs, layer


LAYERS = {"delta": delta, "decay": decay, "latent": latent}


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
    inputs, layer = LAYERS[args.layer](args)
    whole = [x.requires_grad_() for x in inputs.values()]
    out = layer(None, *whole)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    out.backward(do)
    results = [out.detach(), *(x.grad for x in whole)]
    return {"inputs": [x.detach() for x in whole], "do": do, "results": results}


# ---- on every rank


@dataclasses.dataclass
class Step:
    """A forward and backward call for this rank's tokens, at `positions` of the sequence."""

    sp: SequenceParallel
    layer: Layer
    inputs: list[Tensor]
    do: Tensor
    positions: Tensor

    def run(self) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in self.inputs]
        out = self.layer(self.sp, *inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.do)]

    @staticmethod
    def error(found: Tensor, wanted: Tensor) -> float:
        return ((found - wanted).abs().max() / wanted.abs().max()).item()

    def __call__(self) -> None:
        self.run()


def build(spec: Spec, args: argparse.Namespace, folder: str) -> str | None:
    """Create the next step of a contender. Return None, or the reason why the contender cannot run.

    The reason is determined before any communication.
    """
    try:
        config = SequenceParallelConfig.from_dict({"size": dist.get_world_size(), **spec.section})
        sp = SequenceParallel(config, heads=(args.heads, args.heads))
    except (SeqParError, ValueError) as reason:
        return str(reason).splitlines()[0]
    whole, positions = torch.load(Path(folder, "tensors"), mmap=True), sp.shard(torch.arange(args.seq), 0)
    inputs = [x[:, positions].contiguous() for x in whole["inputs"]]
    layer = LAYERS[args.layer](args)[1]
    on_ranks.STEPS.append(Step(sp, layer, inputs, whole["do"][:, positions].contiguous(), positions))
    return None


def _step(index: int) -> Step:
    found = on_ranks.STEPS[index]
    assert isinstance(found, Step)
    return found


def difference(index: int, folder: str) -> float:
    """Return the maximum error of this rank's results, compared with one process."""
    whole, step = torch.load(Path(folder, "tensors"), mmap=True), _step(index)
    return max(step.error(a, b[:, step.positions]) for a, b in zip(step.run(), whole["results"], strict=True))


def most_alive(index: int) -> int:
    """Return the peak bytes of tensors that a call allocates."""
    step = _step(index)
    with Live(*step.inputs, step.do) as live:
        step.run()
    return live.peak


def received(index: int) -> int:
    """Return the bytes that this rank has received."""
    return 4 * sum(_step(index).sp.comm.received.values())


# ---- the table


def title(args: argparse.Namespace) -> str:
    return (
        f"{on_ranks.places(args, args.link)}; {args.layer}, forward and backward, {args.seq} tokens, "
        f"{args.heads} heads of {args.head_dim}, fp32; median of {args.rounds}"
    )


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Format the rows as Markdown. Below the table, list contenders that cannot run, with reasons."""
    able, lines = [row for row in rows if row.get("seconds")], []
    for row in able:
        median, first = statistics.median(row["seconds"]), statistics.median(able[0]["seconds"])
        most = max(*row["out"], *row["in"])
        sizes = [f"{row['peak'] / 2**20:.0f}"]
        sizes += [f"{size / 1e6:.2f}" for size in (max(row["out"]), max(row["in"]), row["counted"])]
        lines.append([row["name"], f"{median:.3f}", tables.spread(row["seconds"]), f"{first / median:.2f}", *sizes,
                      f"{most / net.rate_of(args.link) / median:.2f}"])  # fmt: skip
    return on_ranks.report(COLUMNS, lines, rows, args)


if __name__ == "__main__":
    main()
