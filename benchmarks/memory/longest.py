"""The longest sequence whose training step fits, by model, GPUs and what is in host memory. Figures: nothing is run.

    python -m benchmarks.memory.longest

Every row: bf16, ZeRO-3, checkpoints in host memory, a ring over all ranks with as many head stages as there are
key/value heads, MLPs and loss in tiles, attention run twice: what takes the least memory.
"""

from __future__ import annotations

from benchmarks import tables
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.deepspeed_json import Offload, Zero
from ds_seqpar.planner.footprint import footprint, longest
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.request import Model, Room, Step

GIB = 2**30
# name -> hidden, intermediate, layers, heads, key/value heads, head_dim, vocabulary
SHAPES = {
    "8B (Llama-3)": (4096, 14336, 32, 32, 8, 128, 128256),
    "32B (Qwen2.5)": (5120, 27648, 64, 40, 8, 128, 152064),
    "70B (Llama-3)": (8192, 28672, 80, 64, 8, 128, 128256),
}
MACHINES = {"80 GB": "h100-ib", "141 GB": "h200-ib"}
OPTIMISER = {"on the GPU": "none", "in host memory": "cpu"}
FULL = {"rank": "the GPU", "host": "the host", "": "nothing"}
LEAN = {
    "ulysses": 1, "head_stages": 8, "mlp_tiles": "auto", "loss_tiles": "auto", "offload_checkpoints": True,
    "keep_attention": False,
}  # fmt: skip


def model_of(name: str) -> Model:
    hidden, intermediate, layers, heads, kv_heads, dim, vocab = SHAPES[name]
    own = hidden * (2 * dim * (heads + kv_heads) + 3 * intermediate + 2)
    return Model(
        hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=dim,
        vocab=vocab, parameters=layers * own + 2 * vocab * hidden + hidden, layer_parameters=own,
    )  # fmt: skip


def step_of(name: str, ranks: int, device: str) -> Step:
    model, zero = model_of(name), Zero(stage=3, offload_optimizer=Offload(device=device))
    config = SequenceParallelConfig(size=ranks, **LEAN).resolve(ranks, (model.heads, model.kv_heads))
    return Step(model=model, config=config, world=ranks, seq=2 * ranks, zero=zero)


def rows(nodes: list[int]) -> list[list[str]]:
    found = []
    for name in SHAPES:
        for memory, place in MACHINES.items():
            machine = Machine.load(place)
            for ranks in (count * machine.per_node for count in nodes):
                room, cells = Room.of(machine, ranks), list[str]()
                for device in OPTIMISER.values():
                    step = step_of(name, ranks, device)
                    most = longest(step, room)
                    if most.tokens == 0:
                        cells += ["-", FULL[most.full], "-"]
                        continue
                    said = footprint(Step(**{**vars(step), "seq": most.tokens}))
                    node = said.host.total * room.together / GIB
                    cells += [f"{most.tokens / 1e6:.2f}M", FULL[most.full], f"{node:,.0f}"]
                found.append([name, f"{ranks} x {memory}", *cells])
    return found


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--nodes", default="1,2,4", help="of 8 GPUs, with commas")
    nodes = [int(count) for count in parser.parse_args().nodes.split(",")]
    where = [(f"optimiser {place}: tokens", "then full", "GiB a host") for place in OPTIMISER]
    print(tables.table(["model", "GPUs", *(name for names in where for name in names)], rows(nodes)))


if __name__ == "__main__":
    main()
