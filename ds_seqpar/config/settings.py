"""The user's settings: the `"sequence_parallel"` section of a DeepSpeed JSON, as one frozen dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..compiler import schedules
from ..compiler.compile import Recipe
from ..compiler.program.ulysses import SaveChoice, saved_for_backward
from ..compiler.schedules.base import MOVING_SIDES, PLACEMENTS, Schedule, Value, is_count
from ..compiler.sharding import layout as layouts
from ..compiler.sharding.heads import has_equal_shares, largest_share, max_head_chunks
from ..compiler.sharding.layout import Axes, Topology, axis_order, divisors
from ..compiler.tiles.launches import KERNELS
from ..errors import SECTION, ConfigError, InputError, check_choice, did_you_mean, quoted_list

CONFIGURATION = "sequence parallel configuration"  # what ranks agree on
UNREADABLE = "SequenceParallel needs a configuration that can be read; reading it failed"
Count: TypeAlias = int | Any  # a whole number, or "auto" until `resolve` has chosen one

LAYOUTS = tuple(layout.name for layout in layouts.COMMON)
TRAVELS = ("auto", *MOVING_SIDES)
TRAVEL_DTYPES = ("fp32", "bf16")
PLANNED_FOR = ("seq_len", "machine")  # settings that only tell the planner what to plan for
PLANNED = ("size", "ulysses", "schedule", "head_chunks")  # if none of them is "auto", there is nothing to plan
# settings that save memory
MEMORY_SETTINGS = ("loss_tiles", "mlp_tiles", "head_chunks", "keep_exchanged", "offload_checkpoints", "keep_attention")
PLAN_REQUESTS = (*PLANNED_FOR, "memory")  # settings that ask for a plan, and that a plan does not have


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class SequenceParallelConfig:
    """How one sequence is shared by `size` ranks. The JSON section has the same field names.

    size: ranks that share one sequence (P). "auto": all ranks of the job.
    ulysses: ranks of an all-to-all from sequence to heads (U); the other `size / ulysses` (A) run `schedule`.
        At most the query heads. Heads that it does not divide are dealt unevenly (`compiler.heads`); the member with
        the most sets the pace. "auto": the largest that divides `size`, shares the model's heads equally and fits the
        schedule's shape; 1 where heads are not known. The floor on received bytes falls as 1/sqrt(U P).
    schedule: what the inner A ranks do: a name in ds_seqpar/compiler/schedules, or one that you `register` there. Its
        own settings are given and read as those here. `python -m ds_seqpar show --help` lists all.
    forward, backward: what goes round, "kv" or "q" with its results. "auto" is what sends fewer bytes.
    overlap: transfers of single blocks in place of collectives, and products as their operands arrive.
    placement: the order of axes over ranks, the fastest first, as names or a preset; see compiler.layout.axis_order.
        "ulysses_intra" ("auto") keeps Ulysses' all-to-all inside a node; "collectives_intra" a schedule's gathers and
        "ring_intra" its ring (WallFacer's two placements).
    travel_dtype: of partial outputs and gradients between ranks: "fp32" (or wider, for fp64), "bf16". (fp16 has not
        the range: gradients of a mean loss over many tokens vanish in it.)
    layout: which tokens a rank holds. "contiguous". "zigzag": chunks r and 2A-1-r of 2A; equal causal work in every
        step. "striped": every A-th token (Striped Attention, section 3). "balanced": packed documents as
        `compiler.balance` deals them, one document as "zigzag". "auto" is the schedule's: most have "balanced".
    kernel: the block kernel; "auto" is the first that can take the blocks.
    head_chunks: attention runs on that many parts of the heads, one after the other, and its buffers are those of one
        part (Untied Ulysses). At most the key/value heads. With `overlap` Ulysses' exchanges run while other stages
        compute. "auto" with a `seq_len` or a `machine`: the planner chooses head chunks and overlap. Else "auto" is the
        fewest with which buffers take no more than q, k, v and out do, among those that send no more bytes; or the
        most of these.
    keep_attention: where activations are checkpointed, attention's forward and all that it sends run once a step,
        because its results are kept (DistFlashAttn, section 3.3). False runs them again, and keeps nothing.
    keep_exchanged: whether backward finds the q, k and v that Ulysses' exchange brought to forward. false: the exchange
        is repeated, which is slower and takes less memory. "auto": they are kept, unless `head_chunks` saves memory:
        more than one, without overlap, and with no checkpoint that keeps attention.
    offload_checkpoints: what checkpoints save, and what they keep, goes to host memory until backward needs it.
    mlp_tiles, loss_tiles: in how many tiles of a rank's tokens a patched model computes MLPs and norms, and logits with
        the loss. So what they make never stands whole in memory (ALST, section 3.1). 1: as the model does. "auto" is
        chosen in each forward, by each rank for its own tokens (docs/memory.md).
    seq_len: tokens of the whole sequence that a size, ulysses, schedule or head_chunks of "auto" is planned for
        (docs/planner.md). "auto": with a machine, the longest that a Trainer's data set says it has.
    machine: what they are planned for: a preset's name, or the file that `python -m ds_seqpar calibrate` wrote. "auto":
        with a seq_len, what ranks see of their devices and hosts. With neither, nothing is planned.
    memory: "auto" plans the fastest that fits the machine of head_chunks, keep_attention, keep_exchanged,
        offload_checkpoints, mlp_tiles and loss_tiles, where the section does not say them. "given": nothing is planned.
    own: the schedule's own settings that are not "auto", sorted by name; config.NAME is one of them.
    unsaid: what "memory" has still to choose, by name.
    """

    size: Count = "auto"
    ulysses: Count = "auto"
    schedule: str = "auto"
    layout: str = "auto"
    forward: str = "auto"
    backward: str = "auto"
    overlap: bool = False
    placement: Sequence[str] | str = "auto"
    travel_dtype: str = "fp32"
    kernel: str = "auto"
    head_chunks: Count = 1
    keep_attention: bool = True
    keep_exchanged: bool | str = "auto"
    offload_checkpoints: bool = False
    mlp_tiles: Count = 1
    loss_tiles: Count = 1
    seq_len: Count = "auto"
    machine: str = "auto"
    memory: str = "given"
    own: tuple[tuple[str, Value], ...] = ()
    unsaid: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        own: Mapping[str, Value] | tuple[tuple[str, Value], ...] = (),
        unsaid: tuple[str, ...] | None = None,
        **settings: Any,
    ) -> None:
        """settings: those above and the schedules' own, by name; they win over `own`. Raises ConfigError for a setting
        that does not exist, or whose value cannot be right whatever the others are."""
        settings = {**dict(own), **settings}
        check_names(settings)
        if unsaid is None:
            chosen = MEMORY_SETTINGS if settings.get("memory") == "auto" else ()
            unsaid = tuple(name for name in chosen if name not in settings)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, settings.pop(field.name, field.default))
        known = schedules.settings()
        given = {name: known[name][0].checked(value) for name, value in settings.items()}
        object.__setattr__(self, "own", tuple(sorted(item for item in given.items() if item[1] != "auto")))
        object.__setattr__(self, "unsaid", unsaid)
        self._check()

    def _check(self) -> None:
        for field in ("size", "ulysses", "head_chunks", "mlp_tiles", "loss_tiles", "seq_len"):
            value = getattr(self, field)
            if value != "auto" and not is_count(value):
                raise ConfigError(f'{SECTION}.{field} must be a whole number from 1 or "auto"; got {value!r}')
        for field in ("overlap", "keep_attention", "offload_checkpoints"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{SECTION}.{field} must be true or false; got {getattr(self, field)!r}")
        if self.keep_exchanged != "auto" and not isinstance(self.keep_exchanged, bool):
            raise ConfigError(f'{SECTION}.keep_exchanged must be true, false or "auto"; got {self.keep_exchanged!r}')
        if not isinstance(self.machine, str) or not self.machine:
            raise ConfigError(
                f"{SECTION}.machine must be the name of a preset, or a JSON file by its path; got {self.machine!r}"
            )
        if isinstance(self.placement, Sequence) and not isinstance(self.placement, str):
            if not all(isinstance(name, str) for name in self.placement):
                raise ConfigError(f"{SECTION}.placement must be a list of names of axes; got {self.placement!r}")
            object.__setattr__(self, "placement", tuple(self.placement))
        else:
            check_choice(f"{SECTION}.placement", self.placement, PLACEMENTS)
        if self.travel_dtype == "fp16":
            raise ConfigError(
                f'{SECTION}.travel_dtype must be fp32 or bf16; got "fp16", in which gradients of a mean loss vanish, '
                'use "bf16", which takes as many bytes'
            )
        for field, names in (("forward", TRAVELS), ("backward", TRAVELS), ("travel_dtype", TRAVEL_DTYPES),
                             ("layout", ("auto", *layouts.LAYOUTS)), ("kernel", KERNELS),
                             ("memory", ("given", "auto"))):  # fmt: skip
            check_choice(f"{SECTION}.{field}", getattr(self, field), names)
        schedules.schedule(self.schedule)

    def __getattr__(self, name: str) -> Value | str:
        """A schedule's own setting."""
        if name in schedules.settings():
            return dict(vars(self).get("own", ())).get(name, "auto")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        words = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"{type(self).__name__}({words})"

    def settings(self) -> dict[str, Any]:
        """All by name, as the JSON would have them."""
        return {name: getattr(self, name) for name in setting_names()}

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> SequenceParallelConfig:
        """From the section itself. Raises ConfigError for a key that does not exist, naming the nearest that does."""
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{SECTION}" must be an object such as {{"size": 4, "ulysses": 2}}; got {section!r}')
        check_names(section)
        return cls(**section)

    @classmethod
    def from_deepspeed(cls, config: str | Path | Mapping[str, Any]) -> SequenceParallelConfig:
        """From a DeepSpeed configuration (a JSON file's path, or the dict). No section: every field "auto".

        Raises ConfigError for a section that is misspelt, or stands inside another one.
        """
        from .deepspeed_json import read_deepspeed, section_of  # for those who have such a file

        return cls.from_dict(section_of(read_deepspeed(config)))

    def resolve(self, world_size: int, heads: tuple[int, int] | None = None) -> SequenceParallelConfig:
        """The same with every "auto" replaced, but for those of tiles, which each forward chooses.

        world_size: ranks of the job. heads: (query heads, key/value heads) of the model, where known.
        Raises ConfigError where size does not divide the world, ulysses not the size, or ulysses does not fit heads.
        """
        if heads is not None and not (isinstance(heads, Sequence) and len(heads) == 2 and all(map(is_count, heads))):
            raise ConfigError(f"heads must be the model's numbers of query and key/value heads; got {heads!r}")
        size = world_size if self.size == "auto" else self.size
        if world_size % size:
            raise ConfigError(
                f"{SECTION}.size must divide the number of ranks; got size {size} on {world_size} ranks, "
                f"use one of {divisors(world_size)}"
            )
        chosen = schedules.schedule(self.schedule)
        self._check_own(chosen)
        resolved = dataclasses.replace(self, size=size, schedule=chosen.name)
        resolved = dataclasses.replace(resolved, ulysses=resolved._ulysses(heads))
        resolved = dataclasses.replace(resolved, own=resolved._shape(heads))
        chosen = chosen.at(size // resolved.ulysses, dict(resolved.own))
        resolved._check_choices(chosen)
        if self.layout == "auto":
            resolved = dataclasses.replace(resolved, layout=chosen.default_layout)
        resolved.topology(world_size)  # which raises for a placement that is none
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
            check_heads(ulysses, *heads, size=self.size, head_chunks=self.head_chunks)
        return self._largest_ulysses(heads) if heads and self.ulysses == "auto" else ulysses

    def _largest_ulysses(self, heads: tuple[int, int]) -> int:
        """The largest Ulysses degree that divides the heads equally, leaves each member a head in every head chunk, and
        leaves inner ranks in a number that the schedule's own settings fit."""
        head_chunks = 1 if self.head_chunks == "auto" else self.head_chunks
        legal = [u for u in even_ulysses(self.size, *heads) if max_head_chunks(*heads, u) >= head_chunks]
        for ulysses in sorted(legal, reverse=True):
            try:
                dataclasses.replace(self, ulysses=ulysses)._shape(heads)
            except ConfigError:
                if not self.own and ulysses == min(legal):
                    raise
                continue
            return ulysses
        shape = ", ".join(f"{name} {value}" for name, value in self.own)
        raise ConfigError(
            f"{SECTION}.{'/'.join(dict(self.own))} must fit the inner ranks, size / ulysses; got {shape} for size "
            f"{self.size}, whose ulysses degrees that divide {heads[0]} query and {heads[1]} key/value heads equally "
            f"are {legal}"
        )

    def _check_own(self, chosen: Schedule) -> None:
        """Raises ConfigError for a setting of another schedule's."""
        known = schedules.settings()
        for name, _ in self.own:
            if (owner := known[name][1]) is not chosen:
                raise ConfigError(
                    f'{SECTION}.{name} belongs to schedule "{owner.name}"; got it with "{chosen.name}", '
                    f'set "schedule": "{owner.name}" or leave {name} out'
                )

    def _check_choices(self, chosen: Schedule) -> None:
        """Raises ConfigError for a value that this schedule does not take; the sentence names schedules that do."""
        for name, legal in _choices(chosen).items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in ("auto", *legal):
                others = [n for n, s in schedules.SCHEDULES.items() if n != chosen.name and value in _choices(s)[name]]
                raise ConfigError(
                    f'{SECTION}.{name} must be {quoted_list(legal)} with schedule "{chosen.name}"; got "{value}", '
                    f"change it{f', or use schedule {quoted_list(others)}' if others else ''}"
                )

    def _shape(self, heads: tuple[int, int] | None) -> tuple[tuple[str, Value], ...]:
        """The schedule's own settings, with every "auto" replaced."""
        if heads:  # all Ulysses members must choose alike, so they choose for the one with the most heads
            heads = largest_share(*heads, self.ulysses)
        chosen = schedules.schedule(self.schedule)
        return tuple(chosen.shaped(self.size // self.ulysses, dict(self.own), heads, self.layout).items())

    def section(self) -> dict[str, Any]:
        """Of a resolved config, the section of a DeepSpeed JSON: size, ulysses, schedule, and what is not the default.
        What asked for a plan is left out."""
        settings, defaults = self.settings(), SequenceParallelConfig().settings()
        section = {name: settings.pop(name) for name in ("size", "ulysses", "schedule")}
        inner, own = self.size // self.ulysses, dict(self.own)
        alone = own if inner == 1 else {}
        layout = schedules.schedule(self.schedule).at(inner, own).default_layout
        for name, value in settings.items():
            is_default = value == defaults[name] or (name == "layout" and value == layout)
            if not is_default and name not in (*PLAN_REQUESTS, *alone):
                section[name] = list(value) if isinstance(value, tuple) else value
        return section

    @property
    def inner_axes(self) -> Axes:
        """Of a resolved config: names and sizes of the axes of its inner ranks, the first one numbered fastest."""
        return schedules.schedule(self.schedule).axes(self.size // self.ulysses, dict(self.own))

    def topology(self, world_size: int) -> Topology:
        """Of a resolved config: all ranks of the job as named axes."""
        chosen, axes = schedules.schedule(self.schedule), self.inner_axes
        order, data = axis_order(axes, self.placement, chosen.placements), world_size // self.size
        return Topology.of(axes, ulysses=self.ulysses, data=data, order=order, collective_axes=chosen.collective_axes)

    @property
    def asks_for_plan(self) -> bool:
        """Whether the planner must choose: `seq_len` or `machine` is given and one of `PLANNED` is "auto", or `memory`
        is "auto" and leaves settings open."""
        requested = any(getattr(self, name) != "auto" for name in PLANNED_FOR)
        shape = requested and isinstance(self.placement, str) and "auto" in (getattr(self, name) for name in PLANNED)
        return shape or bool(self.unsaid)

    def kept(self, head_chunks: int, checkpointed: bool, keeps: bool) -> SaveChoice:
        """What attention's forward keeps for backward, of a resolved config. checkpointed: whether a checkpoint is
        around attention; keeps: whether that checkpoint keeps attention's results."""
        return saved_for_backward(self.ulysses, head_chunks, checkpointed, keeps, self.overlap, self.keep_exchanged)

    def recipe(self, topology: Topology) -> Recipe:
        """The Recipe that programs are made from, of a resolved config."""
        return Recipe(
            schedule=schedules.schedule(self.schedule),
            topology=topology,
            forward=self.forward,
            backward=self.backward,
            overlap=self.overlap,
        )


def setting_names() -> tuple[str, ...]:
    """The names of all settings: the common ones and the schedules' own."""
    every = [field.name for field in dataclasses.fields(SequenceParallelConfig)]
    if twice := [name for name in every if name in schedules.settings()]:
        raise ConfigError(f"a schedule's settings need names of their own; got {', '.join(twice)}, rename it")
    return (*(name for name in every if name not in ("own", "unsaid")), *schedules.settings())


def check_names(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a setting that does not exist, naming the nearest that does."""
    known = setting_names()
    for name in settings:
        if name not in known:
            raise ConfigError(f'"{SECTION}" takes {", ".join(known)}; got {name!r}{did_you_mean(str(name), known)}')


def _choices(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Setting -> the words that a schedule takes, for the common settings that are words."""
    sides = ("auto", *schedule.moving_sides)
    return {"layout": schedule.layouts, "forward": sides, "backward": sides, "placement": tuple(schedule.placements)}


def legal_ulysses(size: int, q_heads: int) -> list[int]:
    """The Ulysses degrees that divide `size` and leave no member without a query head."""
    return [u for u in divisors(size) if u <= q_heads]


def even_ulysses(size: int, q_heads: int, kv_heads: int) -> list[int]:
    """The Ulysses degrees U that divide `size` and the heads equally. Where U > kv_heads, U / kv_heads members share a
    key/value head."""
    return [u for u in divisors(size) if has_equal_shares(q_heads, kv_heads, u)]


def check_heads(ulysses: int, q_heads: int, kv_heads: int, *, size: int, head_chunks: Count = 1) -> None:
    """Raises ConfigError where these heads cannot be dealt to so many Ulysses members, in so many head chunks."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise ConfigError(f"query heads must be a multiple of key/value heads; got {q_heads} and {kv_heads}")
    if ulysses > q_heads:
        raise ConfigError(
            f"{SECTION}.ulysses must be at most the number of query heads, so that every member has one; got ulysses "
            f"{ulysses} for {q_heads} query and {kv_heads} key/value heads, use one of {legal_ulysses(size, q_heads)}"
        )
    most = max_head_chunks(q_heads, kv_heads, ulysses)
    if head_chunks != "auto" and head_chunks > most:
        raise ConfigError(
            f"{SECTION}.head_chunks must leave every head chunk a key/value head, and a query head for each "
            f"of {ulysses} Ulysses members; got {head_chunks} for {q_heads} query and {kv_heads} key/value heads, "
            f"use at most {most}"
        )


HOST_PIECE = 2**26  # bytes of the host tensors that offloaded checkpoints are copied into; the last may be smaller


def most_logits(vocab: int, hidden: int) -> int:
    """The most bytes of a tile's fp32 logits with loss_tiles "auto": a quarter of the head's fp32 gradient, which
    exists at the same time, and at most 256 MiB."""
    return min(2**28, vocab * hidden)


def check_length(config: SequenceParallelConfig, seq: int) -> None:
    """Raises InputError, naming the next length that fits, unless a sequence of `seq` tokens can be shared."""
    step = layouts.multiple(config.layout, config.size, config.ulysses)
    if seq < 1 or seq % step:
        fits = max(1, -(-seq // step)) * step
        raise InputError(
            f"a sequence's length must be a multiple of {step} for the {config.layout} layout on {config.size} "
            f"ranks with ulysses {config.ulysses}; got {seq}, pad it (on the right) to {fits}, or share it by "
            "sp.place(length), which has a mask and shards for attention"
        )
