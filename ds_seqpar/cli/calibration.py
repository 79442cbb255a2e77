"""What a machine does in how long, measured on all ranks at the same time, as they work in a step. Where ranks share
cores or a link, the figures are those of a share."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from ..compiler.masks import CAUSAL, FULL, Mask
from ..compiler.tiles import Tile
from ..config import SequenceParallelConfig
from ..errors import ConfigError, KernelError
from ..planner.machine import FLOPS_PER_PAIR
from ..runtime.call import Saved
from ..runtime.comm import ALL_GATHER, Comm, Message
from ..runtime.devices import host_memory, name_of, own_device, ranks_a_node
from ..runtime.kernels import KERNELS, BlockSpec, Kernel, Scores, candidates, select
from ..runtime.runtime import Runtime, run

# by type of device: tokens of tiles, (heads, head_dim) of them, head_dims at which kernels are compared, sides of
# products of matrices, bytes of a long message
TILES = {"cpu": (32, 64, 128, 256, 512, 1024), "gpu": (256, 512, 1024, 2048, 4096, 8192, 16384)}
HEADS = {"cpu": (4, 64), "gpu": (16, 128)}
HEAD_DIMS = {"cpu": (64,), "gpu": (64, 128, 256)}
MATRIX = {"cpu": 512, "gpu": 8192}
LONG = {"cpu": 2**22, "gpu": 2**26}
PIECES = 16  # tensors that together no cache holds, each a quarter of what follows
MOVED = {"cpu": 2**22, "gpu": 2**28}  # bytes of a tensor that is added to
WINDOWS = 5  # of calls, of whose means the median is taken
# seconds of a window, at least. Where ranks share cores, what is shorter than a turn of the scheduler (some ms) takes
# either the time that it has alone or a turn more, and no median of single calls is what it takes on average
WINDOW = {"cpu": 0.04, "gpu": 0.004}
SLOW = 0.25  # seconds of a tile beyond which no larger one is looked at: its rate is taken for theirs
LASTING = 0.1  # seconds that the longest message takes, about, where links are slow
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13 renamed it
MODULES, HOOKED = 32, 5  # of a model whose hooks are looked at, and in how many steps
SHARED = 0.75  # a node's ranks share a link where together they get less of what as many alone would


class Calibration:
    """Figures of the machine, each by a method that all ranks call together and that tells all the same. Seconds are
    medians on each rank, and their mean over ranks."""

    def __init__(self, comm: Comm, world: dist.ProcessGroup) -> None:
        """comm: between all ranks, by their number; world: all of them, for CPU tensors."""
        self.comm, self.group, self.device = comm, world, own_device() or torch.device("cpu")
        self.kind = "cpu" if self.device.type == "cpu" else "gpu"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.per_node = self.agreed_per_node()
        self.nodes = self.world // self.per_node
        self.measured: dict[str, list[str]] = {}
        self.bar = tqdm(desc="calibrating", unit=" figures", disable=self.rank != 0)

    def agreed_per_node(self) -> int:
        own = ranks_a_node(self.world)
        if len(every := set(self.gathered(own))) > 1 or self.world % own:
            raise ConfigError(f"the planner knows nodes of equally many ranks; got nodes of {sorted(every)}")
        return own

    def gathered(self, own: object) -> list[Any]:
        """What every rank gave."""
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, own, group=self.group)
        return every

    def what(self) -> str:
        if self.kind == "cpu":
            return f"{os.cpu_count()} cores a node, {torch.get_num_threads()} threads a rank"
        return torch.cuda.get_device_name(self.device)

    # ---- clocks

    def seconds(self, function: Callable[[], object], count: int | None = None, counts: bool = True) -> float:
        """Of one call: the median of windows' means on each rank, and of those the mean. count: of calls, where ranks
        need each other's; counts: whether this rank's figure does."""
        function()
        self.settle()
        dist.barrier(self.group)
        means = [self.window(function, count and max(1, count // WINDOWS)) for _ in range(WINDOWS)]
        every = self.gathered(statistics.median(means) if counts else None)
        self.bar.update()
        return statistics.mean(median for median in every if median is not None)

    def window(self, function: Callable[[], object], count: int | None) -> float:
        """Seconds of a call, of so many, or of as many as fill a window."""
        done, began, took = 0, time.perf_counter(), 0.0
        while done < (count or 1) or (count is None and took < WINDOW[self.kind]):
            function()
            self.settle()
            done += 1
            took = time.perf_counter() - began
        return took / done

    def settle(self) -> None:
        if self.kind != "cpu":
            torch.accelerator.synchronize()

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    # ---- work

    def kernels(self) -> Iterator[tuple[str, torch.dtype, Kernel]]:
        """Of each dtype that there is a kernel for: on a GPU only fast ones count."""
        heads, dim = HEADS[self.kind]
        for dtype in (torch.float32, torch.bfloat16):
            with contextlib.suppress(KernelError):
                spec = BlockSpec(self.device.type, dtype, heads, heads, dim)
                kernel = select("auto", spec, tuple(self.measured.get(spec.case(CAUSAL), ())))
                yield str(dtype).removeprefix("torch."), dtype, kernel

    def product(self, tokens: int) -> Callable[[], object]:
        """A function that calls the kernel of one dtype."""
        heads, dim = HEADS[self.kind]
        _, dtype, kernel = next(self.kernels())
        q, k, v = (self.random(1, tokens, heads, dim, dtype=dtype) for _ in range(3))
        return lambda: kernel.forward(q, k, v, False, 1.0)

    def orders(self) -> dict[str, dict[str, list[str]]]:
        """Device -> case -> the kernels that take it, the fastest first, both ways together. One order for all devices
        of these ranks, which must all choose the same. What is measured later takes the first."""
        tokens = TILES[self.kind][-2]
        documents = Mask(documents=(0, tokens // 16, tokens // 8, tokens // 4, tokens // 2))
        masks = FULL, CAUSAL, Mask(window=tokens // 8), documents
        dtypes = torch.float32, torch.bfloat16, torch.float16
        for dtype, dim, mask in itertools.product(dtypes, HEAD_DIMS[self.kind], masks):
            heads = HEADS[self.kind][0]
            spec = BlockSpec(self.device.type, dtype, heads, max(1, heads // 4), dim)
            took = self.compared(spec, mask, tokens)
            self.measured[spec.case(mask)] = sorted(took, key=lambda name: took[name])
        return {name: self.measured for name in sorted(set(self.gathered(name_of(self.device))))}

    def compared(self, spec: BlockSpec, mask: Mask, tokens: int) -> dict[str, float]:
        """Seconds, forward and backward, of each kernel that takes such blocks on every rank. The dense score matrix is
        left out, and of documents what makes a graph for each length."""
        counts = spec.q_heads, spec.kv_heads, spec.kv_heads, spec.q_heads
        given = [self.random(1, tokens, heads, spec.head_dim, dtype=spec.dtype) for heads in counts]
        names = [name for name in candidates(spec) if name != "reference" and not KERNELS[name].reasons(spec)]
        if mask.documents[1:]:
            names = [name for name in names if not getattr(KERNELS[name], "one_shape", False)]
        calls = {name: self.attends(name, mask, *given) for name in names}
        failed = {name: said for name, once in calls.items() if (said := self.failure(once))}
        every = self.gathered((set(calls) - set(failed), failed))
        for name, said in {name: said for _, theirs in every for name, said in theirs.items()}.items():
            if self.rank == 0:
                tqdm.write(f"{name} fails at {spec.case(mask)}, and is left out of its order: {said}", file=sys.stderr)
        return {name: self.seconds(once) for name, once in calls.items() if all(name in works for works, _ in every)}

    def attends(self, kernel: str, mask: Mask, *given: Tensor) -> Callable[[], object]:
        """A function that attends to q, k and v, and goes back with do, by the kernel and this rank alone."""
        q, k, v, do = given
        config = SequenceParallelConfig(size=1, ulysses=1, kernel=kernel).resolve(1)
        alone = Runtime(config, config.topology(1), 0, self.comm)
        settings = mask, alone.shards(q.shape[1]), Scores(q.shape[3] ** -0.5)

        def once() -> None:
            out, lse, *_ = run(alone.forward(q, k, v, None, *settings, keep=0))
            own = {"do": do, "q": q, "k": k, "v": v, "out": out}
            run(alone.backward(own, k.shape[2], None, Saved([lse], [], []), *settings))

        return once

    def failure(self, once: Callable[[], object]) -> str:
        """What the function raises; "" where it works."""
        try:
            once()
            self.settle()
        except Exception as error:  # a package that was built for another torch cannot be imported
            return str(error).partition("\n")[0]
        return ""

    def attention(self) -> dict[str, Any]:
        """dtype -> direction -> kind -> (tokens, flops/s of what the mask leaves)."""
        found: dict[str, Any] = {}
        for name, dtype, kernel in self.kernels():
            found[name] = {way: {"full": [], "causal": []} for way in FLOPS_PER_PAIR}
            for kind in ("full", "causal"):
                took = 0.0
                for tokens in TILES[self.kind]:
                    if took < SLOW:
                        took = self.tile(kernel, dtype, kind, tokens, found[name])
        return found

    def tile(self, kernel: Kernel, dtype: torch.dtype, kind: Any, tokens: int, found: dict[str, Any]) -> float:
        """Adds its rates to those found; returns its seconds."""
        heads, dim = HEADS[self.kind]
        q, k, v, do = (self.random(1, tokens, heads, dim, dtype=dtype) for _ in range(4))
        options = kind == "causal", dim**-0.5
        out, lse = kernel.forward(q, k, v, *options)
        took = {
            "forward": self.seconds(lambda: kernel.forward(q, k, v, *options)),
            "backward": self.seconds(lambda: kernel.backward(do, q, k, v, out, lse, *options)),
        }
        pairs = Tile(0, tokens, 0, tokens, kind).products * heads * dim
        for way, seconds in took.items():
            found[way][kind].append([tokens, FLOPS_PER_PAIR[way] * pairs / seconds])
        return sum(took.values())

    def gemm(self) -> dict[str, float]:
        side, found = MATRIX[self.kind], {}
        for name, dtype, _ in self.kernels():
            a, b = (self.random(side, side, dtype=dtype) for _ in range(2))
            found[name] = 2 * side**3 / self.seconds(functools.partial(torch.mm, a, b))
        return found

    def memory_rate(self, device: torch.device | None = None) -> float:
        """Bytes read and written by an addition, as results are merged. device: default: the rank's."""
        x, y = (torch.randn(MOVED[self.kind] // 4, device=device or self.device) for _ in range(2))
        return 3 * 4 * x.numel() / self.seconds(lambda: x.add_(y))

    def host_rate(self) -> float:
        """The same of a node's host memory, by all its ranks together."""
        return self.per_node * self.memory_rate(torch.device("cpu"))

    def elementwise_rate(self) -> float:
        """Bytes read and written by products of elements, as in a layer: of one tensor after another, to new ones that
        are kept."""
        inputs = [self.random(MOVED[self.kind] // 16, dtype=torch.float32) for _ in range(PIECES)]
        pairs = list(itertools.pairwise(inputs))
        return len(pairs) * 3 * 4 * inputs[0].numel() / self.seconds(lambda: [x * y for x, y in pairs])

    def offload_rate(self) -> float:
        x = self.random(MOVED[self.kind] // 4, dtype=torch.float32)
        host = torch.empty(x.shape, pin_memory=self.kind != "cpu")
        return 4 * x.numel() / self.seconds(lambda: host.copy_(x))

    def instruction(self) -> float:
        """Seconds of the host for what hardly computes: a kernel's call on one token."""
        once, many = self.product(1), 32
        return self.seconds(lambda: [once() for _ in range(many)]) / many

    def memory(self) -> float:
        """Bytes that a rank may have: of its device, or its share of the node's."""
        if self.kind != "cpu":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return host_memory() / self.per_node

    # ---- links

    def neighbour(self, apart: int) -> int | None:
        """The rank `apart` further in a pair of groups of so many; None where it has no partner."""
        other = self.rank + apart if self.rank // apart % 2 == 0 else self.rank - apart
        same_node = other // self.per_node == self.rank // self.per_node
        return other if other < self.world and same_node == (apart < self.per_node) else None

    def link(self, peer: int | None) -> dict[str, Any]:
        """Between each rank and its peer, all pairs at once. Where both ways at once take longer than one alone, the
        rate is one's."""
        counts = peer is not None
        latency = self.seconds(self.trade(peer, 8), 200, counts)
        both = self.slope(lambda size: self.trade(peer, size), counts)
        one = self.slope(lambda size: self.trade(peer, size, both=False), counts)
        duplex = both < 1.5 * one
        return {"latency": latency, "rate": 1 / (both if duplex else one), "duplex": duplex}

    def slope(self, made: Callable[[int], Callable[[], object]], counts: bool = True) -> float:
        """Seconds of a byte more. made: gives the function for so many bytes. What a few bytes take is no part of it:
        where cores are shared, they may take longer than many. So a long message is one that takes some time, too."""
        least = LONG[self.kind] // 16
        factor = min(16, max(1, round(LASTING / self.seconds(made(least), WINDOWS, counts))))
        long, count = factor * least, 4 * WINDOWS if factor == 16 else WINDOWS
        took = [self.seconds(made(size), count, counts) for size in (long // 4, long)]
        return (took[1] - took[0]) / (long - long // 4) if took[1] > took[0] else took[1] / long

    def between(self) -> tuple[dict[str, Any], float | None]:
        """From node to node: a rank's alone, and bytes/s of a node's together where they share a link."""
        peer = self.neighbour(self.per_node)
        alone = self.link(peer if self.rank % self.per_node == 0 else None)
        if self.per_node == 1:
            return alone, None
        together = self.link(peer)["rate"]
        return alone, self.per_node * together if together < SHARED * alone["rate"] else None

    def trade(
        self, peer: int | None, size: int, both: bool = True, meanwhile: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """A function that sends so many bytes to the peer and receives as many; not both: the lower rank sends.
        meanwhile: what it does while they travel."""
        sent, received = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))

        def once() -> None:
            if peer is None:
                meanwhile()
                return
            sends, receives = ([Message(peer, "calibration", size, x, 0)] for x in (sent, received))
            lower = self.rank < peer
            work = self.comm.post(sends if both or lower else [], receives if both or not lower else [])
            meanwhile()
            work.wait()

        return once

    def stolen(self, link: dict[str, Any]) -> float:
        """Seconds of a rank's work that a byte takes which it sends or receives meanwhile."""
        once, size = self.product(512), LONG[self.kind]
        peer = self.neighbour(1 if self.per_node > 1 else self.per_node)
        count = max(1, round(2 * size / link["rate"] / self.seconds(once)))

        def products() -> None:
            for _ in range(count):
                once()

        beside = self.trade(peer, size, meanwhile=products)

        alone, together = (self.seconds(function, 5, peer is not None) for function in (products, beside))
        return max(0.0, together - alone) / (2 * size)


# ---- ZeRO


def zero_costs(measured: Calibration) -> dict[str, Any]:
    """Collectives of all ranks as DeepSpeed calls them, and the host's time for a module with measured hooks."""
    forward, backward = _hooks(measured)
    kinds = ("gather", "reduce", "all_reduce")
    return {"ranks": measured.world, **{kind: _collective(measured, kind) for kind in kinds},
            "forward": forward, "backward": backward}  # fmt: skip


def _collective(measured: Calibration, kind: str) -> dict[str, float]:
    def made(size: int) -> Callable[[], object]:
        whole = torch.zeros(max(1, size // 4 // measured.world) * measured.world, device=measured.device)
        part = torch.zeros(whole.numel() // measured.world, device=measured.device)
        if kind == "gather":
            return lambda: ALL_GATHER(whole, part)
        return lambda: REDUCE_SCATTER(part, whole) if kind == "reduce" else dist.all_reduce(whole)

    latency = measured.seconds(made(8), 50)
    return {"latency": latency, "rate": 1 / measured.slope(made)}


def _hooks(measured: Calibration) -> tuple[float, float]:
    """Seconds of the host, forward and backward, for a module that hardly computes: nothing is gathered, and
    reductions wait for a bucket that holds them all. The first two steps are another matter: ZeRO learns the
    order in which modules are called."""
    import deepspeed  # which takes seconds

    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(MODULES)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 64, "reduce_bucket_size": 2**16}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": 10**9,
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}  # fmt: skip
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.ones(1, 8, device=measured.device)
    took: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(2 + HOOKED):
        dist.barrier(measured.group)
        marks = [time.perf_counter()]
        loss = engine(x).sum()
        marks.append(time.perf_counter())
        engine.backward(loss)
        marks.append(time.perf_counter())
        engine.step()
        for way, began, ended in zip(took, marks, marks[1:], strict=False):
            took[way].append((ended - began) / MODULES)
    engine.destroy()
    every = measured.gathered([statistics.median(times[2:]) for times in took.values()])
    measured.bar.update()
    forward, backward = (statistics.mean(ways) for ways in zip(*every, strict=True))
    return forward, backward
