"""Plans as text: a schedule by hand, and those of schedules as files have them."""

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.core.compiler.compile import block_mask_of
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.sharding.layout import multiple
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from tests.unit.plans import DIRECTIONS

SHAPE = shape_of("fp32", "bfloat16", 1, (8, 8, 128))

# each rank sends its keys and values straight to all others
STAR = """# by hand
star forward, 3 ranks
step  rank 0                                       rank 1                                       rank 2
0     q(0)*kv(0) kv(0)>1 kv(0)>2 kv(1)<1 kv(2)<2  q(1)*kv(1) kv(1)>0 kv(1)>2 kv(0)<0 kv(2)<2  q(2)*kv(2) kv(2)>0 kv(2)>1 kv(0)<0 kv(1)<1
1     q(0)*kv(1) q(0)*kv(2)                        q(1)*kv(0) q(1)*kv(2)                        q(2)*kv(0) q(2)*kv(1)

star backward, 3 ranks
step  rank 0                                       rank 1                                       rank 2
0     q(0)*kv(0) kv(0)>1 kv(0)>2 kv(1)<1 kv(2)<2  q(1)*kv(1) kv(1)>0 kv(1)>2 kv(0)<0 kv(2)<2  q(2)*kv(2) kv(2)>0 kv(2)>1 kv(0)<0 kv(1)<1
1     q(0)*kv(1) q(0)*kv(2) dkv(1)>1 dkv(2)>2 dkv(0)<1 dkv(0)<2  q(1)*kv(0) q(1)*kv(2) dkv(0)>0 dkv(2)>2 dkv(1)<0 dkv(1)<2  q(2)*kv(0) q(2)*kv(1) dkv(0)>0 dkv(1)>1 dkv(2)<0 dkv(2)<1
"""  # noqa: E501


def plans_of(schedule, size, options, overlap=False, mask=CAUSAL):
    config = SequenceParallelConfig(schedule=schedule, size=size, ulysses=1, overlap=overlap, **options).resolve(size)
    recipe = config.recipe(config.topology(size))
    block_mask = block_mask_of(mask, EvenShards(config.layout, 2 * multiple(config.layout, size, 1), size))
    return {direction: recipe.plan(direction, block_mask, SHAPE) for direction in DIRECTIONS}


def file_of(plans):
    return "\n\n".join(plan.table() for plan in plans.values())


def save(folder, content, name="my.plan"):
    """The setting of a file with this content."""
    (folder / name).write_text(content, encoding="utf-8")
    return f"file:{folder / name}"
