"""What a user chooses: the `"sequence_parallel"` section of a DeepSpeed JSON, as one frozen dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .deepspeed_json import SECTION, read_deepspeed, section_of
from .errors import ConfigError, choose, nearest
from .planning import shapes
from .planning.shapes import Axes, divisors

LAYOUTS = ("contiguous", "striped", "zigzag")
SCHEDULES = ("attention2d", "distflash", "double_ring", "mesh", "ring", "wallfacer")
TRAVELS = ("auto", "kv", "q")
TRAVEL_DTYPES = ("fp32", "bf16")
PLACEMENTS = ("auto", "collectives_intra", "ring_intra", "ulysses_intra")
# the fields that give a schedule its shape -> the schedule they belong to
SHAPE_FIELDS = {
    "window": "double_ring",
    "rows": "attention2d",
    "cols": "attention2d",
    "team": "wallfacer",
    "mesh": "mesh",
}
KERNELS = ("auto", "cpu_flash", "cuda_flash", "flash_attn", "reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """How one sequence is shared by `size` ranks. The JSON section has the same field names.

    size: ranks that share one sequence (P). "auto": all ranks of the job.
    ulysses: ranks of an all-to-all that trades sequence for heads (U); the other `size / ulysses` (A) run `schedule`.
        "auto": the largest that divides `size` and fits the model's heads and what is said of the schedule's shape, 1
        where heads are not known. The floor on received bytes falls as 1/sqrt(U P), so larger is better until heads or
        slow links end it.
    schedule: what the inner A ranks do: "ring" (Ring Attention), "double_ring" (BurstAttention), "distflash"
        (DistFlashAttn), "attention2d", "wallfacer", or "mesh", which contains ring, attention2d and wallfacer. "auto"
        is "ring".
    window: double_ring: ranks of the inner ring, a node's. rows, cols: attention2d: k/v is gathered over `rows` ranks
        and q over `cols`. team: wallfacer: the team size C. mesh: [a, b, R]: q is gathered over a ranks, k/v over b, R
        go round. Each "auto" is chosen; see ds_seqpar.shapes.
    forward, backward: what goes round, "kv" or "q" (with its results; "q" in backward is BurstAttention's); "auto" is
        what sends fewer bytes.
    overlap: expand collectives into single transfers and order products as their operands arrive (ds_seqpar.overlap).
    placement: the order of axes over ranks, the fastest first, as names or a preset; see ds_seqpar.shapes.place.
    travel_dtype: of partial outputs and gradients between ranks: "fp32" (or wider, for fp64), "bf16". (fp16 has not
        the range: gradients of a mean loss over many tokens vanish in it.)
    layout: which tokens a rank holds: "zigzag" (chunks r and 2A-1-r of 2A; equal causal work in every step), "striped"
        (every A-th token; Striped Attention, section 3) or "contiguous". "auto" is "zigzag".
    kernel: the block kernel; "auto" is the first that can take the blocks.
    """

    size: int | str = "auto"
    ulysses: int | str = "auto"
    schedule: str = "auto"
    layout: str = "auto"
    window: int | str = "auto"
    rows: int | str = "auto"
    cols: int | str = "auto"
    team: int | str = "auto"
    mesh: Sequence[int] | str = "auto"
    forward: str = "auto"
    backward: str = "auto"
    overlap: bool = False
    placement: Sequence[str] | str = "auto"
    travel_dtype: str = "fp32"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        for field in ("size", "ulysses", "window", "rows", "cols", "team"):
            value = getattr(self, field)
            if value != "auto" and not _is_count(value):
                raise ConfigError(f'{SECTION}.{field} must be a whole number from 1 or "auto"; got {value!r}')
        if self.mesh != "auto":
            if isinstance(self.mesh, str) or not isinstance(self.mesh, Sequence) or len(self.mesh) != 3:
                raise ConfigError(f'{SECTION}.mesh must be three whole numbers [a, b, R] or "auto"; got {self.mesh!r}')
            if not all(map(_is_count, self.mesh)):
                raise ConfigError(f'{SECTION}.mesh must be three whole numbers [a, b, R] or "auto"; got {self.mesh!r}')
            object.__setattr__(self, "mesh", tuple(self.mesh))
        if not isinstance(self.overlap, bool):
            raise ConfigError(f"{SECTION}.overlap must be true or false; got {self.overlap!r}")
        if isinstance(self.placement, Sequence) and not isinstance(self.placement, str):
            if not all(isinstance(name, str) for name in self.placement):
                raise ConfigError(f"{SECTION}.placement must be a list of names of axes; got {self.placement!r}")
            object.__setattr__(self, "placement", tuple(self.placement))
        else:
            choose(f"{SECTION}.placement", self.placement, PLACEMENTS)
        choose(f"{SECTION}.forward", self.forward, TRAVELS)
        choose(f"{SECTION}.backward", self.backward, TRAVELS)
        if self.travel_dtype == "fp16":
            raise ConfigError(
                f'{SECTION}.travel_dtype must be fp32 or bf16; got "fp16", in which gradients of a mean loss vanish, '
                'use "bf16", which takes as many bytes'
            )
        choose(f"{SECTION}.travel_dtype", self.travel_dtype, TRAVEL_DTYPES)
        choose(f"{SECTION}.schedule", self.schedule, ("auto", *SCHEDULES))
        choose(f"{SECTION}.layout", self.layout, ("auto", *LAYOUTS))
        choose(f"{SECTION}.kernel", self.kernel, KERNELS)

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> SequenceParallelConfig:
        """From the section itself. Raises ConfigError for a key that does not exist, naming the nearest that does."""
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{SECTION}" must be an object such as {{"size": 4, "ulysses": 2}}; got {section!r}')
        known = [field.name for field in dataclasses.fields(cls)]
        for key in section:
            if key not in known:
                raise ConfigError(f'"{SECTION}" takes {", ".join(known)}; got {key!r}{nearest(str(key), known)}')
        return cls(**section)

    @classmethod
    def from_deepspeed(cls, config: str | Path | Mapping[str, Any]) -> SequenceParallelConfig:
        """From a DeepSpeed configuration (a JSON file's path, or the dict). No section: every field "auto".

        Raises ConfigError for a section that is misspelt, or stands inside another one.
        """
        return cls.from_dict(section_of(read_deepspeed(config)))

    def resolve(self, world_size: int, heads: tuple[int, int] | None = None) -> SequenceParallelConfig:
        """The same with every "auto" replaced.

        world_size: ranks of the job. heads: (query heads, key/value heads) of the model, where known.
        Raises ConfigError where size does not divide the world, ulysses not the size, or ulysses does not fit heads.
        """
        if heads is not None and not (isinstance(heads, Sequence) and len(heads) == 2 and all(map(_is_count, heads))):
            raise ConfigError(f"heads must be the model's numbers of query and key/value heads; got {heads!r}")
        size = world_size if self.size == "auto" else self.size
        if world_size % size:
            raise ConfigError(
                f"{SECTION}.size must divide the number of ranks; got size {size} on {world_size} ranks, "
                f"use one of {divisors(world_size)}"
            )
        schedule = "ring" if self.schedule == "auto" else self.schedule
        # DistFlashAttn balances a contiguous layout by itself
        layout = ("contiguous" if schedule == "distflash" else "zigzag") if self.layout == "auto" else self.layout
        self._check_fields(schedule, layout)
        resolved = dataclasses.replace(self, size=size, schedule=schedule, layout=layout)
        resolved = dataclasses.replace(resolved, ulysses=resolved._ulysses(heads))
        resolved = dataclasses.replace(resolved, **resolved._shape(heads))
        shapes.place(resolved.inner_axes, resolved.placement)
        return resolved

    def _ulysses(self, heads: tuple[int, int] | None) -> int:
        """The Ulysses degree, checked or chosen."""
        ulysses = self.ulysses if self.ulysses != "auto" else 1
        if self.size % ulysses:
            raise ConfigError(
                f"{SECTION}.ulysses must divide {SECTION}.size; got ulysses {ulysses}, size {self.size}, "
                f"use one of {divisors(self.size)}"
            )
        if heads:
            check_heads(ulysses, *heads, size=self.size)
        return self._largest_ulysses(heads) if heads and self.ulysses == "auto" else ulysses

    def _largest_ulysses(self, heads: tuple[int, int]) -> int:
        """The largest with which the schedule has the shape that was asked for."""
        legal = legal_ulysses(self.size, *heads)
        given = {field: getattr(self, field) for field in SHAPE_FIELDS if getattr(self, field) != "auto"}
        for ulysses in sorted(legal, reverse=True):
            try:
                dataclasses.replace(self, ulysses=ulysses)._shape(heads)
            except ConfigError:
                continue
            return ulysses
        shape = ", ".join(f"{field} {value}" for field, value in given.items())
        raise ConfigError(
            f"{SECTION}.{'/'.join(given)} must fit the inner ranks, size / ulysses; got {shape} for size {self.size}, "
            f"whose ulysses degrees for {heads[0]} query and {heads[1]} key/value heads are {legal}"
        )

    def _check_fields(self, schedule: str, layout: str) -> None:
        for field, owner in SHAPE_FIELDS.items():
            if getattr(self, field) != "auto" and schedule != owner:
                raise ConfigError(
                    f'{SECTION}.{field} belongs to schedule "{owner}"; got it with "{schedule}", '
                    f'set "schedule": "{owner}" or leave {field} out'
                )
        if schedule == "distflash":
            if layout != "contiguous":
                raise ConfigError(
                    f'schedule "distflash" balances causal work on the contiguous layout; got layout "{layout}", '
                    'use "contiguous", or schedule "ring" with this layout'
                )
            if "q" in (self.forward, self.backward):
                raise ConfigError(
                    'schedule "distflash" moves k/v and queries by itself; got "q" for forward or backward, '
                    'leave them out, or use schedule "ring" or "mesh"'
                )

    def _shape(self, heads: tuple[int, int] | None) -> dict[str, Any]:
        """The schedule's own fields without "auto"."""
        ranks = self.size // self.ulysses
        if heads:  # those of a Ulysses member; where members are more than key/value heads, each has one of these
            heads = heads[0] // self.ulysses, max(1, heads[1] // self.ulysses)
        if self.schedule == "double_ring":
            return {"window": shapes.double_ring(ranks, self.window)[0][1]}
        if self.schedule == "attention2d":
            (_, a), (_, b), _ = shapes.attention2d(ranks, self.rows, self.cols, heads)
            return {"rows": b, "cols": a}
        if self.schedule == "wallfacer":
            return {"team": shapes.wallfacer(ranks, self.team)[0][1]}
        if self.schedule == "mesh":
            return {"mesh": tuple(size for _, size in shapes.mesh(ranks, self.mesh, heads))}
        return {}

    @property
    def inner_axes(self) -> Axes:
        """Of a resolved config: names and sizes of the axes of its inner ranks, the first one numbered fastest."""
        ranks = self.size // self.ulysses
        if self.schedule == "double_ring":
            return shapes.double_ring(ranks, self.window)
        if self.schedule == "attention2d":
            return shapes.attention2d(ranks, self.rows, self.cols, None)
        if self.schedule == "wallfacer":
            return shapes.wallfacer(ranks, self.team)
        if self.schedule == "mesh":
            return shapes.mesh(ranks, self.mesh, None)
        return shapes.ring(ranks)


def legal_ulysses(size: int, q_heads: int, kv_heads: int) -> list[int]:
    """The Ulysses degrees that divide `size` and fit the heads. Where U > kv_heads, U / kv_heads members share one."""
    return [u for u in divisors(size) if q_heads % u == 0 and (kv_heads % u == 0 or u % kv_heads == 0)]


def check_heads(ulysses: int, q_heads: int, kv_heads: int, *, size: int) -> None:
    """Raises ConfigError where this Ulysses degree cannot share these heads equally."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise ConfigError(f"query heads must be a multiple of key/value heads; got {q_heads} and {kv_heads}")
    legal = legal_ulysses(size, q_heads, kv_heads)
    if ulysses not in legal:
        raise ConfigError(
            f"{SECTION}.ulysses must divide the query heads and divide, or be a multiple of, the key/value heads; "
            f"got ulysses {ulysses} for {q_heads} query and {kv_heads} key/value heads, use one of {legal}"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
