"""What five papers measured, through the planner's model of machines: python -m benchmarks.papers [scaling]

Nothing is run and nothing is fitted to a result. Models and links that a paper does not name are supposed, and said so.
`scaling`: attention of one sequence of 4 million tokens on up to 1,024 ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

from ds_seqpar.compiler.plan import columns
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.deepspeed_json import Zero
from ds_seqpar.planner.closed import closed
from ds_seqpar.planner.machine import Machine, Wire
from ds_seqpar.planner.plan import plan
from ds_seqpar.planner.prices import call_seconds
from ds_seqpar.planner.request import Model, Request, Step
from ds_seqpar.planner.steptime import call_of, step_time

A100, H100 = Machine.load("a100-ib"), Machine.load("h100-ib")
ETHERNET = Wire(latency=3e-5, rate=1.1e10)  # 100 Gb/s
# Attention2D's clusters, with a port of 100 Gb/s a node supposed: 4 A100 on PCIe 4.0 a node; one H100 a node
PCIE = dataclasses.replace(A100, per_node=4, inside=Wire(latency=1e-5, rate=2e10), between=ETHERNET, uplink=1.1e10)
SINGLE = dataclasses.replace(H100, per_node=1, between=ETHERNET, uplink=1.1e10)
KI = 1024


def model(
    layers: int, heads: int, head_dim: int, kv_heads: int = 0, intermediate: int = 0, vocab: int = 32000
) -> Model:
    """intermediate 0: 4 times the hidden size with two matrices, which are as many flops as 8/3 with three."""
    hidden, kv_heads = heads * head_dim, kv_heads or heads
    intermediate = intermediate or hidden * 8 // 3
    own = 2 * (heads + kv_heads) * head_dim * hidden + 3 * hidden * intermediate + 2 * hidden
    return Model(
        hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=vocab, parameters=layers * own + 2 * vocab * hidden + hidden, layer_parameters=own,
    )  # fmt: skip


LLAMA_7B = model(32, 32, 128, intermediate=11008)
LLAMA_33H = model(32, 33, 128, intermediate=11008)
LLAMA3_8B = model(32, 32, 128, kv_heads=8, intermediate=14336, vocab=128256)
GPT_1B, GPT_2_7B, GPT_13B = model(24, 16, 128), model(32, 32, 80), model(40, 40, 128)


def step_of(its: Model, ranks: int, seq: int, checkpointing: bool = True, **settings: object) -> Step:
    config = SequenceParallelConfig(size=ranks, travel_dtype="bf16", **settings).resolve(
        ranks, (its.heads, its.kv_heads)
    )
    return Step(model=its, config=config, world=ranks, seq=seq, zero=Zero(stage=3), checkpointing=checkpointing)


def attention(machine: Machine, step: Step) -> tuple[float, float]:
    """Seconds of a layer forward and backward, simulated."""
    call = call_of(step)
    forward, backward = (call_seconds(machine, call, way) for way in ("forward", "backward"))
    return forward, backward


def seconds(machine: Machine, step: Step) -> float:
    """Of a step."""
    return step_time(step, machine, *attention(machine, step)).seconds


def striped() -> Iterator[tuple[str, str, float, float]]:
    """Of Striped Attention's abstract: 8 A100, 262,144 tokens, up to 1.45 end to end. Its model's shape is supposed."""
    ring, even = (
        step_of(GPT_1B, 8, 256 * KI, ulysses=1, backward="kv", layout=layout) for layout in ("contiguous", "striped")
    )
    yield (
        "Striped Attention",
        "striped over contiguous ring, 8 A100, 256K, a step (up to)",
        1.45,
        (seconds(A100, ring) / seconds(A100, even)),
    )


def distflash() -> Iterator[tuple[str, str, float, float]]:
    name = "DistFlashAttn"
    alone = attention(A100, step_of(LLAMA_7B, 1, 256 * KI))[0]
    late = attention(A100, step_of(LLAMA_7B, 8, 256 * KI, ulysses=1, layout="contiguous"))[0]
    even = attention(A100, step_of(LLAMA_7B, 8, 256 * KI, ulysses=1, schedule="distflash"))[0]
    yield name, "contiguous ring over 1 GPU, 8 A100, 256K, forward (section 4.6)", 4.5, alone / late
    yield name, "balanced over 1 GPU, the same", 7.5, alone / even
    yield name, "balanced over contiguous ring (section 4.4)", 1.67, late / even
    for its, words, tokens, paper in (
        (LLAMA_7B, "32 heads", 256, 1.21), (LLAMA_7B, "32 heads", 512, 1.26), (LLAMA_33H, "33 heads", 512, 1.88),
    ):  # fmt: skip
        ulysses = step_of(its, 16, tokens * KI, ulysses=16, keep_attention=False)
        own = step_of(its, 16, tokens * KI, ulysses=1, schedule="distflash")
        text = f"over Ulysses that runs attention twice, {words}, 2 x 8 A100, {tokens}K, a step (table 4)"
        yield name, text, paper, seconds(A100, ulysses) / seconds(A100, own)
    for each, paper in ((8, 1.16), (16, 1.24), (32, 1.31)):
        kept, twice = (
            step_of(LLAMA_7B, 8, 8 * each * KI, ulysses=1, schedule="distflash", keep_attention=keep)
            for keep in (True, False)
        )
        text = f"attention kept by checkpoints, {each}K a GPU, 8 A100 supposed (section 4.6)"
        yield name, text, paper, seconds(A100, twice) / seconds(A100, kept)


def burst() -> Iterator[tuple[str, str, float, float]]:
    """Of backward's bytes; what it compares with in time, Megatron's tensor parallelism, is not modelled."""
    found = [
        closed(A100, call_of(step_of(LLAMA_7B, 32, 128 * KI, ulysses=1, backward=side)), "backward").received
        for side in ("q", "kv")
    ]
    yield (
        "BurstAttention",
        "bytes of backward, q over k/v travelling, 32 ranks (section 3.2: 3 of 4)",
        0.75,
        (found[0] / found[1]),
    )


def attention2d() -> Iterator[tuple[str, str, float, float]]:
    """Lengths and networks are lost in the paper's text or not named: the most of these lengths."""
    for words, machine, paper in (("64 A100 in 16 nodes", PCIE, 5.0), ("64 H100 in 64 nodes", SINGLE, 9.4)):
        found = [
            seconds(machine, step_of(GPT_2_7B, 64, tokens * KI, False, ulysses=1, backward="kv"))
            / min(
                seconds(machine, step_of(GPT_2_7B, 64, tokens * KI, False, ulysses=1, schedule="attention2d",
                                         rows=8, cols=8, placement=placement))
                for placement in ("auto", "collectives_intra")
            )
            for tokens in (32, 128, 512)
        ]  # fmt: skip
        yield "Attention2D", f"8 x 8 over ring, {words}, 2.7B, 32K to 512K, a step (up to)", paper, max(found)


def wallfacer() -> Iterator[tuple[str, str, float, float]]:
    for ranks, tokens, paper in ((32, 64, 1.77), (64, 128, 1.607)):
        ring = seconds(H100, step_of(LLAMA_7B, ranks, tokens * KI, ulysses=1, backward="kv"))
        best = min(
            seconds(H100, step_of(LLAMA_7B, ranks, tokens * KI, ulysses=1, schedule="wallfacer", team=team,
                                  placement=placement))
            for team in (2, 4)
            for placement in ("collectives_intra", "ring_intra")
        )  # fmt: skip
        yield (
            "WallFacer",
            f"over ring, {ranks} H100, {tokens}K, 7B and nodes of 8 supposed, a step (up to)",
            paper,
            ring / best,
        )


def papers() -> None:
    rows = [["paper", "what", "its number", "the model's", "ratio"]]
    for study in (striped, distflash, burst, attention2d, wallfacer):
        for name, what, paper, ours in study():
            rows.append([name, what, f"{paper:.2f}", f"{ours:.2f}", f"{ours / paper:.2f}"])
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    print("\n".join("| " + " | ".join(row) + " |" for row in rows[1:]))


def scaling(seq: int, sizes: Sequence[int]) -> None:
    """All ranks share one sequence, for each number of ranks; seconds of a layer's attention."""
    rows = [
        [
            "ranks",
            "ring ms",
            "Ulysses 8 x ring ms",
            "planned ms",
            "by",
            "of perfect",
            "step ms",
            "ZeRO ms",
            "copies ms",
            "planned",
        ]
    ]
    for ranks in sizes:
        given = {"size": ranks, "travel_dtype": "bf16"}
        request = Request(
            model=LLAMA3_8B, machine=dataclasses.replace(H100, memory=1e15), world=ranks, seq=seq, given=given
        )
        best = plan(request).best
        took = best.time.parts["attention forward"] + best.time.parts["attention backward"]
        steps = [step_of(LLAMA3_8B, ranks, seq, ulysses=u) for u in (1, 8)]
        plain = [sum(closed(H100, call_of(step), way).seconds for way in ("forward", "backward")) for step in steps]
        rates = {4: H100.best_rate("bfloat16", "forward"), 10: H100.best_rate("bfloat16", "backward")}
        perfect = sum(n * request.pairs * 32 * 128 / rate for n, rate in rates.items()) / ranks
        own = took / LLAMA3_8B.layers
        times = [f"{1e3 * x:.1f}" for x in (*plain, own)]
        rows.append(
            [
                str(ranks),
                *times,
                "simulated" if best.simulated else "closed form",
                f"{perfect / own:.0%}",
                *(f"{1e3 * x:.1f}" for x in (best.time.seconds, best.time.parts["ZeRO"], best.time.parts["copies"])),
                str(best.candidate),
            ]
        )
    print(f"{seq} tokens, LLaMA-3-8B, h100-ib; a layer's attention, both directions")
    print("of perfect: its products at the best rate, over the planned time; ring, Ulysses x ring: closed form")
    print("step: of all layers; ZeRO: what it takes of that beyond the work that it runs beside")
    print("\n".join(columns(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("papers", "scaling"), default="papers")
    parser.add_argument("--seq", type=int, default=4 * KI * KI)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2**n for n in range(3, 11)])
    args = parser.parse_args()
    if args.what == "papers":
        papers()
    else:
        scaling(args.seq, args.ranks)


if __name__ == "__main__":
    main()
