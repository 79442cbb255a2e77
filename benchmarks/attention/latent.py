"""Print a table of latent attention's traffic and memory, computed from its programs (docs/benchmarks.md).

    python -m benchmarks.attention.latent
    python -m benchmarks.attention.latent --size 16 --tokens 131072

Rows are models and numbers of Ulysses ranks. The columns compare sending expanded keys and values with sending the
latent. The figures are the MiB received by the busiest rank in forward and backward of one layer, the MiB saved by
forward, and the peak MiB of backward. The setup is a ring in bf16 with a causal mask and one sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import itemgetter

from benchmarks import tables
from benchmarks.cluster.plan import received
from ds_seqpar.analysis.memory import Figures, figures
from ds_seqpar.core.compiler.compile import Compiler
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.program.ulysses import SavedForBackward, UlyssesGroup
from ds_seqpar.core.compiler.sharding.layout import divisors
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.compiler.tiles.launches import PLAIN_KERNEL
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.operators.latent import LatentShape

# heads, head_dim of q and k, head_dim of v, latent width
MODELS = {
    "DeepSeek-V3": (128, 192, 128, 576),
    "DeepSeek-V2-Lite": (16, 192, 128, 576),
    "GLM-4.7-Flash": (20, 256, 256, 576),
    "MiniCPM3-4B": (40, 96, 64, 288),
}
MIB = 2**20


def of_ranks(size: int, ulysses: int, tokens: int, model: str, sent: str) -> Iterator[tuple[int, Figures]]:
    """Yield (bytes received, memory) of each CP rank's first Ulysses rank."""
    heads, dim, v_dim, width = MODELS[model]
    config = SequenceParallelConfig(size=size, ulysses=ulysses).resolve(size, (heads, heads))
    local = shape_of("fp32", "bfloat16", 1, (heads, heads, max(dim, v_dim)))
    if sent == "latent":
        local = shape_of("fp32", "bfloat16", 1, (heads, 1, max(dim, v_dim)), LatentShape, latent=width)
    recipe, saved = config.recipe(config.topology(size)), config.kept(1, checkpointed=False, keeps=False)
    for rank in range(recipe.size):
        place = EvenShards(config.layout, tokens, recipe.size), local, UlyssesGroup(ulysses, 0), PLAIN_KERNEL, 1
        backward_of = saved if ulysses > 1 else SavedForBackward.QKV_AND_OUT
        compiler = Compiler(recipe, rank)
        forward = compiler.bound_call("forward", CAUSAL, *place)
        backward = compiler.bound_call("backward", CAUSAL, *place, backward_of)
        messages = itertools.chain(*(received(bound, (0, rank)) for bound in (forward, backward)))
        yield sum(size for _, size in messages), figures(forward, backward, saved)


def inputs_of(model: str, tokens: int, sent: str, are_kept: bool) -> int:
    """Return the bytes of inputs that backward needs: q, k and v, or q, the latent and the expansion matrix."""
    heads, dim, v_dim, width = MODELS[model]
    keys = width if sent == "latent" else 2 * heads * max(dim, v_dim)
    matrix = heads * width * (dim + v_dim) if sent == "latent" else 0
    return 2 * (are_kept * tokens * (heads * max(dim, v_dim) + keys) + matrix)


def main() -> None:
    args = tables.parser(__doc__, size=8, tokens=32768).parse_args()
    print(f"{args.size} ranks, {args.tokens} tokens\n")
    tables.head("model", "ulysses", "received: expanded", "latent", "ratio", "kept: expanded", "latent",
                "backward's peak: expanded", "latent")  # fmt: skip
    for model, (heads, *_) in MODELS.items():
        for ulysses in (u for u in divisors(args.size) if heads % u == 0):
            found = []
            for sent in ("expanded", "latent"):
                bytes_received, memory = max(of_ranks(args.size, ulysses, args.tokens, model, sent), key=itemgetter(0))
                inputs = inputs_of(model, args.tokens // args.size, sent, memory.inputs)
                found.append((bytes_received, inputs + memory.saved, inputs + memory.backward))
            pairs = [(before / MIB, after / MIB) for before, after in zip(*found, strict=True)]
            (before, after), *memory_pairs = pairs
            tables.row(model, ulysses, f"{before:.0f}", f"{after:.0f}", f"{before / after:.1f}",
                       *(f"{x:.0f}" for pair in memory_pairs for x in pair))  # fmt: skip


if __name__ == "__main__":
    main()
