"""Measurement of a machine's rates and links, on all ranks at the same time, as in a training step. If ranks share
cores or a link, the figures are those of one rank's share."""

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

from ..compiler.program.ulysses import SavedForBackward
from ..compiler.sharding.masks import CAUSAL, FULL, Mask
from ..compiler.tiles.tiles import Tile
from ..config.settings import SequenceParallelConfig
from ..errors import ConfigError, KernelError
from ..planner.machine import FLOPS_PER_PAIR
from ..runtime.call_io import Saved
from ..runtime.comm import ALL_GATHER, Comm, Message
from ..runtime.devices import device_name, host_memory, ranks_per_node, this_device
from ..runtime.kernels import KERNELS, BlockSpec, Kernel, Scores, candidates, select
from ..runtime.runtime import CallSettings, Runtime

TILES = {"cpu": (32, 64, 128, 256, 512, 1024), "gpu": (256, 512, 1024, 2048, 4096, 8192, 16384)}  # tokens of tiles
HEADS = {"cpu": (4, 64), "gpu": (16, 128)}  # (heads, head_dim) of tiles
HEAD_DIMS = {"cpu": (64,), "gpu": (64, 128, 256)}  # head_dims at which kernels are compared
MATRIX = {"cpu": 512, "gpu": 8192}  # rows and columns of a matrix product
LONG = {"cpu": 2**22, "gpu": 2**26}  # bytes of a long message
MOVED = {"cpu": 2**22, "gpu": 2**28}  # bytes of a tensor that another is added to
PIECES = 16  # tensors, each a quarter of that size, which together do not fit a cache
WINDOWS = 5  # windows of calls; the median of their means is a rank's figure
# least seconds of a window. If ranks share cores, some calls take a scheduler's time slice (some ms) longer. The mean
# over a window includes the right share of such slices; a median of single calls does not.
WINDOW = {"cpu": 0.04, "gpu": 0.004}
SLOW = 0.25  # seconds of a tile beyond which no larger tile is measured: larger ones get the same rate
LASTING = 0.1  # about how many seconds the longest message takes on slow links
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13 renamed it
MODULES, HOOKED = 32, 5  # modules of the model whose hooks are measured, and the steps in which they are
SHARED = 0.75  # ranks of a node share a link if each gets less than this share of its rate alone when all send


class Calibration:
    """Measurements of the machine, one figure per method. Methods are collective, and all ranks get the same result.
    Seconds are the mean over ranks of each rank's median.

    Args:
        comm: Communicator of all ranks, by their number.
        world: Group of all ranks, for CPU tensors.
    """

    def __init__(self, comm: Comm, world: dist.ProcessGroup) -> None:
        self.comm, self.group, self.device = comm, world, this_device() or torch.device("cpu")
        self.kind = "cpu" if self.device.type == "cpu" else "gpu"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.per_node = self.agreed_per_node()
        self.nodes = self.world // self.per_node
        self.measured: dict[str, list[str]] = {}
        self.bar = tqdm(desc="calibrating", unit=" figures", disable=self.rank != 0)

    def agreed_per_node(self) -> int:
        per_node = ranks_per_node(self.world)
        if len(counts := set(self.gathered(per_node))) > 1 or self.world % per_node:
            raise ConfigError(f"the planner knows nodes of equally many ranks; got nodes of {sorted(counts)}")
        return per_node

    def gathered(self, local: object) -> list[Any]:
        """Return the objects of all ranks, by rank."""
        of_all_ranks: list[Any] = [None] * self.world
        dist.all_gather_object(of_all_ranks, local, group=self.group)
        return of_all_ranks

    def what(self) -> str:
        if self.kind == "cpu":
            return f"{os.cpu_count()} cores a node, {torch.get_num_threads()} threads a rank"
        return torch.cuda.get_device_name(self.device)

    # ---- clocks

    def seconds(self, function: Callable[[], object], count: int | None = None, counts: bool = True) -> float:
        """Return the seconds of one call.

        Args:
            function: The function to call.
            count: The number of calls, if ranks must make equally many; None: as many as fill the windows.
            counts: Whether this rank's figure is part of the mean over ranks.
        """
        function()
        self.settle()
        dist.barrier(self.group)
        means = [self.window(function, count and max(1, count // WINDOWS)) for _ in range(WINDOWS)]
        medians = self.gathered(statistics.median(means) if counts else None)
        self.bar.update()
        return statistics.mean(median for median in medians if median is not None)

    def window(self, function: Callable[[], object], count: int | None) -> float:
        """Return the mean seconds of `count` calls; None: of as many as fill a window."""
        done, began, elapsed = 0, time.perf_counter(), 0.0
        while done < (count or 1) or (count is None and elapsed < WINDOW[self.kind]):
            function()
            self.settle()
            done += 1
            elapsed = time.perf_counter() - began
        return elapsed / done

    def settle(self) -> None:
        if self.kind != "cpu":
            torch.accelerator.synchronize()

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    # ---- work

    def kernels(self) -> Iterator[tuple[str, torch.dtype, Kernel]]:
        """Yield (name of a dtype, dtype, kernel) for each dtype that "auto" finds a kernel for."""
        heads, dim = HEADS[self.kind]
        for dtype in (torch.float32, torch.bfloat16):
            with contextlib.suppress(KernelError):
                spec = BlockSpec(self.device.type, dtype, heads, heads, dim)
                kernel = select("auto", spec, tuple(self.measured.get(spec.case(CAUSAL), ())))
                yield str(dtype).removeprefix("torch."), dtype, kernel

    def product(self, tokens: int) -> Callable[[], object]:
        """Return a function that calls a kernel on `tokens` tokens."""
        heads, dim = HEADS[self.kind]
        _, dtype, kernel = next(self.kernels())
        q, k, v = (self.random(1, tokens, heads, dim, dtype=dtype) for _ in range(3))
        return lambda: kernel.forward(q, k, v, False, 1.0)

    def orders(self) -> dict[str, dict[str, list[str]]]:
        """Return device name -> case -> kernels that support it, the fastest first (forward and backward together). All
        devices have one order, since all ranks must choose the same kernel. Later figures use the fastest."""
        tokens = TILES[self.kind][-2]
        documents = Mask(documents=(0, tokens // 16, tokens // 8, tokens // 4, tokens // 2))
        masks = FULL, CAUSAL, Mask(window=tokens // 8), documents
        dtypes = torch.float32, torch.bfloat16, torch.float16
        for dtype, dim, mask in itertools.product(dtypes, HEAD_DIMS[self.kind], masks):
            heads = HEADS[self.kind][0]
            spec = BlockSpec(self.device.type, dtype, heads, max(1, heads // 4), dim)
            seconds_by_kernel = self.compared(spec, mask, tokens)
            self.measured[spec.case(mask)] = sorted(seconds_by_kernel, key=lambda name: seconds_by_kernel[name])
        return {name: self.measured for name in sorted(set(self.gathered(device_name(self.device))))}

    def compared(self, spec: BlockSpec, mask: Mask, tokens: int) -> dict[str, float]:
        """Return kernel name -> seconds of forward and backward, for the kernels that support such blocks on every
        rank. The reference, which materializes the score matrix, is left out. For documents, kernels that compile again
        for each length are left out too."""
        counts = spec.q_heads, spec.kv_heads, spec.kv_heads, spec.q_heads
        tensors = [self.random(1, tokens, heads, spec.head_dim, dtype=spec.dtype) for heads in counts]
        names = [name for name in candidates(spec) if name != "reference" and not KERNELS[name].reasons(spec)]
        if mask.documents[1:]:
            names = [name for name in names if not getattr(KERNELS[name], "graph_per_shape", False)]
        calls = {name: self.attends(name, mask, *tensors) for name in names}
        failed = {name: reason for name, call in calls.items() if (reason := self.failure(call))}
        of_all_ranks = self.gathered((set(calls) - set(failed), failed))
        for name, reason in {name: reason for _, failures in of_all_ranks for name, reason in failures.items()}.items():
            if self.rank == 0:
                tqdm.write(
                    f"{name} fails at {spec.case(mask)}, and is left out of its order: {reason}", file=sys.stderr
                )
        return {
            name: self.seconds(call)
            for name, call in calls.items()
            if all(name in working for working, _ in of_all_ranks)
        }

    def attends(self, kernel: str, mask: Mask, *tensors: Tensor) -> Callable[[], object]:
        """Return a function that runs attention forward and backward with the kernel, on this rank only, for the
        tensors q, k, v and do."""
        q, k, v, do = tensors
        config = SequenceParallelConfig(size=1, ulysses=1, kernel=kernel).resolve(1)
        alone = Runtime(config, config.topology(1), 0, self.comm)
        settings = CallSettings(mask, None, Scores(q.shape[3] ** -0.5), saves=SavedForBackward.NOTHING)

        def once() -> None:
            out, lse, *_ = alone.forward_walk(q, k, v, None, settings, None).run()
            blocks = {"do": do, "q": q, "k": k, "v": v, "out": out}
            alone.backward_walk(blocks, k.shape[2], None, Saved([lse], [], []), settings, None).run()

        return once

    def failure(self, once: Callable[[], object]) -> str:
        """Return the first line of the error that the function raises; "" if it raises none."""
        try:
            once()
            self.settle()
        except Exception as error:  # a package that was built for another torch cannot be imported
            return str(error).partition("\n")[0]
        return ""

    def attention(self) -> dict[str, Any]:
        """Return dtype -> direction -> kind of tile -> [[tokens, flops/s of the visible pairs]]."""
        rates: dict[str, Any] = {}
        for name, dtype, kernel in self.kernels():
            rates[name] = {direction: {"full": [], "causal": []} for direction in FLOPS_PER_PAIR}
            for kind in ("full", "causal"):
                seconds = 0.0
                for tokens in TILES[self.kind]:
                    if seconds < SLOW:
                        seconds = self.tile(kernel, dtype, kind, tokens, rates[name])
        return rates

    def tile(self, kernel: Kernel, dtype: torch.dtype, kind: Any, tokens: int, rates: dict[str, Any]) -> float:
        """Add a tile's rates to `rates`, and return its seconds, forward and backward."""
        heads, dim = HEADS[self.kind]
        q, k, v, do = (self.random(1, tokens, heads, dim, dtype=dtype) for _ in range(4))
        options = kind == "causal", dim**-0.5
        out, lse = kernel.forward(q, k, v, *options)
        seconds_by_direction = {
            "forward": self.seconds(lambda: kernel.forward(q, k, v, *options)),
            "backward": self.seconds(lambda: kernel.backward(do, q, k, v, out, lse, *options)),
        }
        pairs = Tile(0, tokens, 0, tokens, kind).pairs * heads * dim
        for direction, seconds in seconds_by_direction.items():
            rates[direction][kind].append([tokens, FLOPS_PER_PAIR[direction] * pairs / seconds])
        return sum(seconds_by_direction.values())

    def gemm(self) -> dict[str, float]:
        side, rates = MATRIX[self.kind], {}
        for name, dtype, _ in self.kernels():
            a, b = (self.random(side, side, dtype=dtype) for _ in range(2))
            rates[name] = 2 * side**3 / self.seconds(functools.partial(torch.mm, a, b))
        return rates

    def memory_rate(self, device: torch.device | None = None) -> float:
        """Return the bytes/s that an in-place addition reads and writes, as in merging of results. `device` is by
        default the rank's."""
        x, y = (torch.randn(MOVED[self.kind] // 4, device=device or self.device) for _ in range(2))
        return 3 * 4 * x.numel() / self.seconds(lambda: x.add_(y))

    def host_rate(self) -> float:
        """Return the bytes/s of a node's host memory, used by all ranks of the node together."""
        return self.per_node * self.memory_rate(torch.device("cpu"))

    def elementwise_rate(self) -> float:
        """Return the bytes/s that elementwise products read and write, as in a layer: one tensor after another, into
        new tensors that are kept."""
        inputs = [self.random(MOVED[self.kind] // 16, dtype=torch.float32) for _ in range(PIECES)]
        pairs = list(itertools.pairwise(inputs))
        return len(pairs) * 3 * 4 * inputs[0].numel() / self.seconds(lambda: [x * y for x, y in pairs])

    def offload_rate(self) -> float:
        x = self.random(MOVED[self.kind] // 4, dtype=torch.float32)
        host = torch.empty(x.shape, pin_memory=self.kind != "cpu")
        return 4 * x.numel() / self.seconds(lambda: host.copy_(x))

    def instruction(self) -> float:
        """Return the host seconds of an instruction: of a kernel's call on one token, which hardly computes."""
        product, many = self.product(1), 32
        return self.seconds(lambda: [product() for _ in range(many)]) / many

    def memory(self) -> float:
        """Return the bytes of a rank's memory: its device's, or on CPUs its share of the host's."""
        if self.kind != "cpu":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return host_memory() / self.per_node

    # ---- links

    def neighbour(self, apart: int) -> int | None:
        """Return this rank's peer if ranks are paired at distance `apart` (1: 0 with 1, and 2 with 3); None if it has
        no peer. A distance below the ranks of a node pairs within nodes, a larger one between nodes."""
        peer = self.rank + apart if self.rank // apart % 2 == 0 else self.rank - apart
        same_node = peer // self.per_node == self.rank // self.per_node
        return peer if peer < self.world and same_node == (apart < self.per_node) else None

    def link(self, peer: int | None) -> dict[str, Any]:
        """Return latency (s) and rate (bytes/s) between each rank and its peer, all pairs at once, and `duplex`:
        whether both directions at once take hardly longer than one; if not, the rate is that of one direction alone."""
        counts = peer is not None
        latency = self.seconds(self.swap(peer, 8), 200, counts)
        both_ways = self.slope(lambda size: self.swap(peer, size), counts)
        one_way = self.slope(lambda size: self.swap(peer, size, both=False), counts)
        duplex = both_ways < 1.5 * one_way
        return {"latency": latency, "rate": 1 / (both_ways if duplex else one_way), "duplex": duplex}

    def slope(self, function_for: Callable[[int], Callable[[], object]], counts: bool = True) -> float:
        """Return the seconds that one more byte takes. `function_for` returns the function to time for a number of
        bytes. Two long messages are compared, because on shared cores a short one may take longer than a long one."""
        least = LONG[self.kind] // 16
        factor = min(16, max(1, round(LASTING / self.seconds(function_for(least), WINDOWS, counts))))
        long, count = factor * least, 4 * WINDOWS if factor == 16 else WINDOWS
        seconds = [self.seconds(function_for(size), count, counts) for size in (long // 4, long)]
        return (seconds[1] - seconds[0]) / (long - long // 4) if seconds[1] > seconds[0] else seconds[1] / long

    def between(self) -> tuple[dict[str, Any], float | None]:
        """Return (the link of one rank to another node; the bytes/s of all ranks of a node together, None if they share
        no link)."""
        peer = self.neighbour(self.per_node)
        alone = self.link(peer if self.rank % self.per_node == 0 else None)
        if self.per_node == 1:
            return alone, None
        together = self.link(peer)["rate"]
        return alone, self.per_node * together if together < SHARED * alone["rate"] else None

    def swap(
        self, peer: int | None, size: int, both: bool = True, meanwhile: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Return a function that sends `size` bytes to the peer and receives as many.

        Args:
            peer: The peer; None: the function only calls `meanwhile`.
            size: Bytes of a message.
            both: Whether both ranks send; if not, only the lower one does.
            meanwhile: Called during the transfer.
        """
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
        """Return the seconds by which each byte that a rank sends or receives delays its concurrent computation."""
        product, size = self.product(512), LONG[self.kind]
        peer = self.neighbour(1 if self.per_node > 1 else self.per_node)
        count = max(1, round(2 * size / link["rate"] / self.seconds(product)))

        def products() -> None:
            for _ in range(count):
                product()

        beside = self.swap(peer, size, meanwhile=products)

        alone, together = (self.seconds(function, 5, peer is not None) for function in (products, beside))
        return max(0.0, together - alone) / (2 * size)


# ---- ZeRO


def zero_costs(measured: Calibration) -> dict[str, Any]:
    """Return the costs of ZeRO by the fields of `planner.machine.ZeroCosts`: collectives of all ranks, and hooks of a
    module."""
    forward, backward = _hooks(measured)
    collectives = ("gather", "reduce", "all_reduce")
    return {"ranks": measured.world, **{collective: _collective(measured, collective) for collective in collectives},
            "forward": forward, "backward": backward}  # fmt: skip


def _collective(measured: Calibration, collective: str) -> dict[str, float]:
    def function_for(size: int) -> Callable[[], object]:
        whole = torch.zeros(max(1, size // 4 // measured.world) * measured.world, device=measured.device)
        shard = torch.zeros(whole.numel() // measured.world, device=measured.device)
        if collective == "gather":
            return lambda: ALL_GATHER(whole, shard)
        return lambda: REDUCE_SCATTER(shard, whole) if collective == "reduce" else dist.all_reduce(whole)

    latency = measured.seconds(function_for(8), 50)
    return {"latency": latency, "rate": 1 / measured.slope(function_for)}


def _hooks(measured: Calibration) -> tuple[float, float]:
    """Return the host seconds (forward, backward) of a module with ZeRO-3's hooks that hardly computes. Nothing is
    gathered, and one bucket holds all gradients. The first two steps do not count: in them ZeRO records the order of
    modules."""
    import deepspeed  # which takes seconds

    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(MODULES)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 64, "reduce_bucket_size": 2**16}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": 10**9,
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}  # fmt: skip
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.ones(1, 8, device=measured.device)
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(2 + HOOKED):
        dist.barrier(measured.group)
        marks = [time.perf_counter()]
        loss = engine(x).sum()
        marks.append(time.perf_counter())
        engine.backward(loss)
        marks.append(time.perf_counter())
        engine.step()
        for direction, began, ended in zip(seconds, marks, marks[1:], strict=False):
            seconds[direction].append((ended - began) / MODULES)
    engine.destroy()
    of_all_ranks = measured.gathered([statistics.median(times[2:]) for times in seconds.values()])
    measured.bar.update()
    forward, backward = (statistics.mean(seconds_of_ranks) for seconds_of_ranks in zip(*of_all_ranks, strict=True))
    return forward, backward
