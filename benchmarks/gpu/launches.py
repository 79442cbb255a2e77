"""Count the operations that a rank launches for the attention of a layer, on fake GPU tensors, without a GPU.

    python -m benchmarks.gpu.launches         # prints the table
    python -m benchmarks.gpu.launches --docs  # keeps it in launches.json and writes it into docs/benchmarks.md

A single rank of a larger group runs forward and backward of a layer, in bf16. The default is 32 query heads and 8
key/value heads of size 128. No data arrives, and fake tensors have no values that could be wrong. The second layer is
counted, since the first layer creates tensors that all layers of a layout share. An operation counts as one kernel,
even if a library launches several. Operations that only allocate or create views are not counted as kernels.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import tables
from ds_seqpar.core.compiler.program.ulysses import SavedForBackward
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.runtime.admit import AttentionOptions
from ds_seqpar.core.runtime.call import AttentionResults, CallSettings
from ds_seqpar.core.runtime.kernels import Scores, accumulate
from ds_seqpar.core.runtime.runtime import Runtime
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.operators import decode as cached
from tests.fake_cuda import Driverless

TABLE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
MARK = "<!-- python -m benchmarks.gpu.launches --docs -->\n"
TOKENS = (4096, 32768, 131072)  # per rank
HEAD_DIM, HEADS = 128, (32, 8)
COUNTED = ("kernels", "copies", "allocations", "transfers", "host waits")
FIRST_COMMIT = "9946703e"  # the commit whose counts are shown next to the current counts
aten = torch.ops.aten


# ---- settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting whose operations are counted. `mask` maps a sequence length to a mask; `saves` selects what forward
    saves for backward.
    """

    section: dict[str, Any]
    heads: tuple[int, int] = HEADS
    mask: Callable[[int], Mask] = lambda seq: CAUSAL
    saves: SavedForBackward = SavedForBackward.NOTHING


def pack_of(documents: int) -> Callable[[int], Mask]:
    """Return a mask of documents with different lengths, which scale with the sequence length."""
    shares = [1 + 37 * number % 61 for number in range(documents)]

    def mask(seq: int) -> Mask:
        lengths = [seq * share // sum(shares) for share in shares[1:]]
        return Mask(documents=Mask.documents_of([seq - sum(lengths), *lengths]))

    return mask


RING = {"size": 8, "ulysses": 1, "schedule": "ring"}
SETTINGS = {
    # forward saves the exchanged q, k and v, and delta is exchanged in place of out
    "Ulysses 8, gradient checkpoints": Setting(section={"size": 8, "ulysses": 8}, saves=SavedForBackward.QKV),
    "ring of 8": Setting(section=RING),
    "ring of 8, 32 key/value heads": Setting(section=RING, heads=(32, 32)),
    "attention2d, 2 x 4": Setting(section={"size": 8, "ulysses": 1, "schedule": "attention2d", "rows": 2}),
    "pack of 64 documents, ring of 8": Setting(section=RING, mask=pack_of(64)),
    "pack of 64 documents, Ulysses 8": Setting(
        section={"size": 8, "ulysses": 8}, mask=pack_of(64), saves=SavedForBackward.QKV
    ),
    "window of an eighth, ring of 8": Setting(section=RING, mask=lambda seq: Mask(window=seq // 8)),
}
DECODE = "decode step, 8 ranks"


# ---- counting


class Count(TorchDispatchMode):
    """Counts operations on a device, and waits of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, Tensor)]
        if all(x.device.type == "cpu" for x in (*given, *made)):
            return found
        old = {x.untyped_storage()._cdata for x in given}
        new = [x for x in made if x.untyped_storage()._cdata not in old and x.numel()]
        name = function.name().partition(".")[0].removeprefix("aten::")
        crosses = len({x.device.type for x in (*given, *made) if x.dim()}) > 1
        is_view = not new and not any(arg.alias_info and arg.alias_info.is_write for arg in function._schema.arguments)
        self.counts["allocations"] += len(new)
        self.counts["kernels"] += not (is_view or "empty" in name)
        self.counts["copies"] += name in ("copy_", "_to_copy", "clone")
        # a copy from unpinned memory may wait for pending work on the device
        self.counts["host waits"] += crosses or name in ("_local_scalar_dense", "nonzero", "equal")
        return found


class Nowhere:
    """A transport that counts and drops all messages."""

    early = 0

    def __init__(self, rank: int) -> None:
        self.rank, self.started, self.received = rank, 0, Counter[str]()

    def post(self, *_: object) -> Nowhere:
        self.started += 1
        return self

    all_gather = all_to_all = exchange = post

    def parts_of_all(self, x: Tensor, what: str) -> Tensor:
        self.started += 1
        return x.new_empty(RING["size"], len(x))

    def wait(self) -> None:
        """Return at once, since no data arrives."""

    def order(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return ranks


@contextmanager
def counting(comm: Nowhere) -> Iterator[Counter[str]]:
    """Context manager that yields a counter, filled in on exit."""
    before, counter = comm.started, Counter[str]()
    with Count() as mode, Driverless():
        yield counter
    counter.update({name: mode.counts[name] for name in COUNTED} | {"transfers": comm.started - before})


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def of_rank(section: dict[str, Any], heads: tuple[int, int]) -> tuple[Runtime, Nowhere]:
    """Return the runtime of the last rank, which sees the most blocks, and its transport."""
    config = SequenceParallelConfig(kernel="cuda_flash", **section)
    config = config.resolve(config.size, heads=heads)
    cp_rank, ulysses_rank = divmod(config.size - 1, config.ulysses)
    comm = Nowhere(cp_rank)
    return Runtime(config, config.topology(config.size), cp_rank, comm, ulysses_rank), comm


def layer(setting: Setting, tokens: int) -> dict[str, Counter[str]]:
    """Return the counts of forward and backward, by direction."""
    runtime, comm = of_rank(setting.section, setting.heads)
    seq = tokens * runtime.config.size
    shards = EvenShards(runtime.config.layout, seq, runtime.size)
    settings = CallSettings(setting.mask(seq), shards, Scores(HEAD_DIM**-0.5, 0.0), saves=setting.saves)
    found = {}
    with FakeTensorMode():
        q, do = (empty(1, tokens, setting.heads[0], HEAD_DIM) for _ in range(2))
        k, v = (empty(1, tokens, setting.heads[1], HEAD_DIM) for _ in range(2))
        for _ in range(2):
            with counting(comm) as found["forward"]:
                results = runtime.forward_walk((q, k, v), None, settings, None).run()
            kept = AttentionResults.of(results, q.dtype, settings)
            local = {"do": do} | ({} if setting.saves.out else {"out": kept.out})
            local |= {} if setting.saves.qkv else {"q": q, "k": k, "v": v}
            with counting(comm) as found["backward"]:
                runtime.backward_walk(local, [q.shape, k.shape, v.shape], None, kept.saved, settings, None).run()
    return found


def decode(tokens: int) -> dict[str, Counter[str]]:
    """Return the counts of attention for a new token, if each rank has cached `tokens` tokens."""
    runtime, comm = of_rank({"size": 8, "ulysses": 8}, HEADS)
    options = AttentionOptions(CAUSAL, None, None)
    with FakeTensorMode():
        q, k, v = empty(1, 1, HEADS[0], HEAD_DIM), *(empty(1, tokens, HEADS[1], HEAD_DIM) for _ in range(2))
        for _ in range(2):
            with counting(comm) as found:
                cached.decode(runtime, q, k, v, None, options, agreed=True)
    return {"forward": found}


def counts(name: str, tokens: int) -> dict[str, Counter[str]]:
    return decode(tokens) if name == DECODE else layer(SETTINGS[name], tokens)


NAMES = (*SETTINGS, DECODE)


# ---- the table


@contextmanager
def without_triton() -> Iterator[None]:
    """Context manager that behaves like a process without Triton kernels."""
    kept, accumulate.FUSED[:] = [*accumulate.FUSED], []
    try:
        yield
    finally:
        accumulate.FUSED[:] = kept


def measured() -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Return counts by setting, direction, and "now" or "without Triton", for `TOKENS[0]` tokens.

    Raises:
        ValueError: A count differs for a larger number of tokens.
    """
    found: dict[str, Any] = {}
    for name in NAMES:
        now = counts(name, TOKENS[0])
        for tokens in TOKENS[1:]:
            if (other := counts(name, tokens)) != now:
                raise ValueError(f"{name} has {now} with {TOKENS[0]} tokens a rank, and {other} with {tokens}")
        with without_triton():
            plain = counts(name, TOKENS[0])
        found[name] = {key: {"now": dict(x), "without Triton": dict(plain[key])} for key, x in now.items()}
    return found


def load() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def rendered(kept: dict[str, Any]) -> str:
    """Format the table of the docs. `kept` is the result of `load`."""
    before, lines = kept["before"], []
    for name, directions in kept["counts"].items():
        for direction, of in directions.items():
            old = ", ".join(f"{before[tokens][name][direction]['kernels']:,}" for tokens in before)
            cells = [of["now"][x] for x in COUNTED]
            lines.append([name, direction, *cells, of["without Triton"]["kernels"], old])
    tokens = " and ".join(f"{int(x) // 1024}K" for x in before)
    last = ["kernels without Triton", f"kernels before ({FIRST_COMMIT}), {tokens} tokens"]
    return tables.table(["a layer's attention", "", *COUNTED, *last], lines)


def main() -> None:
    args = tables.parser(__doc__, docs=False).parse_args()
    kept = {**load(), "counts": measured()}
    if args.docs:
        TABLE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        tables.insert(PAGE, MARK, f"{rendered(kept)}\n")
    print(rendered(kept))


if __name__ == "__main__":
    main()
