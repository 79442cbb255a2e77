"""The user's settings: the `"sequence_parallel"` section of a DeepSpeed JSON, as one frozen dataclass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, Strict, TypeAdapter, ValidationError

from ..base.errors import SECTION, ConfigError, InputError, check_choice, did_you_mean, quoted_list
from ..base.files import STRICT, as_config_error
from .compiler import schedules
from .compiler.compile import Recipe
from .compiler.program.ulysses import SavedForBackward
from .compiler.schedules.base import RANK_ORDERS, Schedule, Value, is_count
from .compiler.sharding import layout as layouts
from .compiler.sharding.heads import check_heads, even_ulysses, largest_share
from .compiler.sharding.layout import Axes, Topology, axis_order, divisors
from .compiler.tiles.launches import KERNELS

CONFIGURATION = "sequence parallel configuration"  # what ranks agree on
UNREADABLE = "SequenceParallel needs a configuration that can be read; reading it"
if TYPE_CHECKING:
    Count: TypeAlias = int | Any  # "auto" until `resolve` has chosen one
else:
    Count = Annotated[int, Field(ge=1)] | Literal["auto"]
AxisNames: TypeAlias = Annotated[tuple[str, ...], Strict(False)]  # of a list too
Rotate: TypeAlias = Literal["auto", "kv", "q"]
CommDtype: TypeAlias = Literal["fp32", "bf16"]

LAYOUTS = tuple(layout.name for layout in layouts.COMMON)
ROTATES, COMM_DTYPES = get_args(Rotate), get_args(CommDtype)
PLANNED_FOR = ("seq_len", "machine")  # settings that only tell the planner what to plan for
PLANNED = ("size", "ulysses", "schedule", "head_chunks")  # if none of them is "auto", there is nothing to plan
# settings that save memory
MEMORY_SETTINGS = (
    "loss_tiles",
    "mlp_tiles",
    "head_chunks",
    "save_qkv_after_all_to_all",
    "offload_checkpoints",
    "recompute_attention",
)
PLAN_REQUESTS = (*PLANNED_FOR, "memory")  # settings that ask for a plan, and that a plan does not have


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The values of a setting; others can be registered. `read` reads values that begin with a prefix."""

    setting: str
    values: Callable[[], Iterable[str]]
    prefixes: Collection[str] = ()
    read: Callable[[str], object] | None = None

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self._checked).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, *_: object) -> dict[str, Any]:
        named, patterns = {"enum": list(self.values())}, "|".join(f"^{prefix}" for prefix in self.prefixes)
        return {"anyOf": [named, {"type": "string", "pattern": patterns}]} if patterns else named

    def _checked(self, value: str) -> str:
        if self.read is not None and value.startswith(tuple(self.prefixes)):
            self.read(value)
        else:
            check_choice(f"{SECTION}.{self.setting}", value, self.values())
        return value


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class SequenceParallelConfig:
    """Configure how `size` ranks share one sequence: the `"sequence_parallel"` section, with the same names.

    Every setting has a default, for most of them `"auto"`, which `resolve` replaces. A schedule's own settings (`rows`,
    `ring_size`, ...) are set and read like those below; `python -m ds_seqpar show --help` lists them.

    Args:
        schedule_options: A schedule's own settings, by name. They may also be passed as keywords.
        auto_fields: The settings that `memory="auto"` must still choose; default: the memory settings that are not
            given.
        **settings: The settings below, and the schedules' own.

    Raises:
        ConfigError: A setting does not exist, or its value is wrong regardless of other settings.
    """

    __pydantic_config__ = STRICT

    size: Count = "auto"
    """Ranks that share one sequence (P); `"auto"`: all ranks of the job."""
    ulysses: Count = "auto"
    """Ranks that exchange tokens for heads in an all-to-all (U), at most the query heads; the other `size / ulysses`
    run `schedule`. `"auto"`: the largest that divides `size`, shares the heads equally and fits the schedule's shape; 1
    where heads are not known."""
    schedule: Annotated[
        str, OneOf("schedule", lambda: ("auto", *schedules.SCHEDULES), schedules.READERS, schedules.schedule)
    ] = "auto"
    """What the `size / ulysses` ranks do: one of these, a registered one, or the plan of a file, which `show --plan`
    printed or somebody wrote. `"auto"`: `"ring"`."""
    layout: Annotated[str, OneOf("layout", lambda: ("auto", *layouts.LAYOUTS))] = "auto"
    """Which tokens a rank holds. `"contiguous"`: neighbors; `"zigzag"`: chunks r and 2A-1-r of 2A, so that causal work
    is equal in every step; `"striped"`: every A-th token (Striped Attention); `"balanced"`: packed documents with equal
    work, one document as `"zigzag"`. `"auto"`: the schedule's own, mostly `"balanced"`."""
    rotate_forward: Rotate = "auto"
    """What rotates in forward: `"kv"`, or `"q"` with its partial results. `"auto"`: what sends fewer bytes."""
    rotate_backward: Rotate = "auto"
    """The same in backward: `"kv"` with its gradients, or `"q"` with the output's gradient and dq."""
    overlap: bool = False
    """Send single blocks in place of collectives, and compute products in the order in which operands arrive."""
    rank_order: AxisNames | Annotated[str, OneOf("rank_order", lambda: RANK_ORDERS)] = "auto"
    """The order of axes over ranks, the fastest first: their names, or a preset. `"ulysses_intra"` (`"auto"`) keeps
    Ulysses' all-to-all inside a node, `"collectives_intra"` a schedule's gathers, `"ring_intra"` its ring
    (WallFacer)."""
    comm_dtype: CommDtype = "fp32"
    """The dtype of partial outputs and gradients between ranks: `"fp32"` (fp64 for fp64 inputs) or `"bf16"`. In fp16
    gradients of a mean loss over many tokens would vanish."""
    kernel: Annotated[str, OneOf("kernel", lambda: KERNELS)] = "auto"
    """The block kernel; `"auto"`: the first that can take the blocks."""
    head_chunks: Count = 1
    """Attend to so many chunks of the heads, at most the key/value heads, one after the other, with buffers of one
    (Untied Ulysses). With `overlap` Ulysses' exchanges run while another chunk computes. `"auto"`: with a `seq_len` or
    a `machine` the planner chooses; else the fewest whose buffers take no more than q, k, v and out, among those that
    send no more bytes."""
    recompute_attention: bool = False
    """With activation checkpointing, run attention and what it sends once more in backward. False keeps attention's
    results, so that it runs once a step (DistFlashAttn)."""
    save_qkv_after_all_to_all: bool | Literal["auto"] = "auto"
    """Save the q, k and v that Ulysses' all-to-all brought to forward. False exchanges them again in backward: slower,
    in less memory. `"auto"`: true, except with several `head_chunks`, without `overlap`, and outside of a checkpoint
    that keeps attention."""
    offload_checkpoints: bool = False
    """Move what checkpoints save to host memory until backward needs it."""
    mlp_tiles: Count = 1
    """Tiles of a rank's tokens in which a patched model computes MLPs and norms (ALST). `"auto"`: each rank chooses in
    each forward."""
    loss_tiles: Count = 1
    """The same for logits and the loss."""
    seq_len: Count = "auto"
    """Tokens of the whole sequence for which `"auto"` settings are planned. `"auto"`: with a `machine`, the longest
    that a Trainer's data set says it has."""
    tokens_per_rank: Count = "auto"
    """Most tokens that a rank holds of a micro-batch: samples of an optimizer step are packed, `tokens_per_rank * size`
    tokens a micro-batch, so that short ones are whole on a rank and long ones shared. `"auto"`: batches stay as they
    are."""
    machine: Annotated[str, Field(min_length=1)] = "auto"
    """The machine for which they are planned: a preset's name, or a JSON file of its rates, links and memory.
    `"auto"`: with a `seq_len`, what ranks see of their devices and hosts."""
    memory: Literal["given", "auto"] = "given"
    """`"auto"`: plan the fastest of `head_chunks`, `recompute_attention`, `save_qkv_after_all_to_all`,
    `offload_checkpoints`, `mlp_tiles` and `loss_tiles` that fits, where they are not given."""
    agreement: Literal["auto", "always"] = "auto"
    """When ranks have compared what they are about to do. `"auto"`: on CPUs before a call sends anything; on
    accelerators a call unlike all before it does, and others are compared at the end of a step, in which hosts then
    wait for one another once. `"always"`: before each call goes on, on any device."""
    recurrent_layers: Literal["auto", "heads", "states"] = "auto"
    """How ranks share layers with a state, such as Mamba-2's. `"heads"`: Ulysses ranks exchange heads, and CP ranks
    pass states on. `"states"`: all ranks pass states on. `"auto"`: what sends fewer bytes."""
    latent_attention: Literal["auto", "expanded", "latent"] = "auto"
    """What latent attention (MLA) sends of a token: `"latent"`, which each rank expands where it computes with it, or
    `"expanded"` keys and values. `"auto"`: the latent, unless it is no smaller, or CP ranks have fewer tokens than it
    has numbers, or there are several `head_chunks`."""
    shared_prompts: Literal["auto"] | bool = "auto"
    """Whether a prompt that several rows begin with is computed once, where a model is asked for numbers a token, as
    trl's trainers do. `"auto"`: where the model can, and a tenth of the tokens or more is saved. `true`: wherever rows
    share one; a model that cannot is refused."""
    divide_media: Literal["auto"] | bool = "auto"
    """Whether ranks divide pictures, frames of films and sounds, so that each makes the features of its own. `"auto"`:
    where those of one do not depend on others, as a small copy of the model shows. `true`: a model whose cannot be
    divided is refused. `false`: every rank makes all."""
    prove: Literal["auto", "always", "never"] = "auto"
    """Whether a small copy of a transformers model is compared, whole and shared, before the model is patched.
    `"auto"`: unless the repository tests its family."""
    doctor: bool = False
    """Whether `initialize` and the Trainer examine the job for some seconds before the first step: ranks, links,
    kernels, attention, and a small copy of the model with its loss, gradients and an optimizer step."""
    max_ctas: Count = "auto"
    """On NVIDIA GPUs, the most thread blocks, of an SM each, that an operation between ranks takes from the products
    which run beside it. `"auto"`: NCCL's own number, up to 32."""
    watchdog: Literal["end", "report"] = "end"
    """What happens once ranks have waited for others for `watchdog_s`, and one report has said who waits for whom:
    `"end"` ends the job, `"report"` waits on."""
    watchdog_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """How many seconds a rank waits for others until then. `"auto"`: half of the process groups' timeout, at least
    60."""
    check_finite: bool = False
    """Whether to look for NaN and inf, and to name the first place where one appears. It waits for the device in each
    layer."""
    schedule_options: tuple[tuple[str, Any], ...] = ()
    """The schedule's own settings that are not `"auto"`, sorted by name."""
    auto_fields: tuple[str, ...] = ()
    """The settings that `memory="auto"` has still to choose."""

    def __init__(
        self,
        *,
        schedule_options: Mapping[str, Value] | tuple[tuple[str, Value], ...] = (),
        auto_fields: tuple[str, ...] | None = None,
        **settings: Any,
    ) -> None:
        settings = {**dict(schedule_options), **settings}
        check_names(settings)
        if auto_fields is None:
            chosen = MEMORY_SETTINGS if settings.get("memory") == "auto" else ()
            auto_fields = tuple(name for name in chosen if name not in settings)
        own = {name: setting.checked(settings.pop(name)) for name, (setting, _) in schedules.settings().items()
               if name in settings}  # fmt: skip
        options = tuple(sorted(item for item in own.items() if item[1] != "auto"))
        settings |= {"schedule_options": options, "auto_fields": auto_fields}
        try:
            _checker().validator.validate_python(settings, self_instance=self)
        except ValidationError as error:
            raise as_config_error(error, settings, f"{SECTION}.", repr) from None

    def __getattr__(self, name: str) -> Value | str:
        if name in schedules.settings():  # a schedule's own
            return dict(vars(self).get("schedule_options", ())).get(name, "auto")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"{type(self).__name__}({settings})"

    def settings(self) -> dict[str, Any]:
        """Return all settings by name, as in the JSON."""
        return {name: getattr(self, name) for name in setting_names()}

    @property
    def chosen_schedule(self) -> Schedule:
        """The named schedule, or the one for "auto"."""
        return schedules.schedule(self.schedule)

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> SequenceParallelConfig:
        """Read the section itself. Raises ConfigError for a key that does not exist, naming the nearest key."""
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{SECTION}" must be an object such as {{"size": 4, "ulysses": 2}}; got {section!r}')
        check_names(section)
        return cls(**section)

    def resolve(
        self, world_size: int, heads: tuple[int, int] | None = None, per_node: int | None = None
    ) -> SequenceParallelConfig:
        """Return the same settings with every `"auto"` replaced, except the numbers of tiles, which each forward
        chooses.

        Args:
            world_size: Number of ranks of the job.
            heads: (query heads, key/value heads) of the model, if known.
            per_node: Number of ranks of a node; an `ulysses` of "auto" stays within it. None: "auto" ignores nodes.

        Raises:
            ConfigError: `size` does not divide the world, `ulysses` does not divide the size, or `ulysses` does not fit
                the heads.
        """
        if heads is not None and not (isinstance(heads, Sequence) and len(heads) == 2 and all(map(is_count, heads))):
            raise ConfigError(f"heads must be the model's numbers of query and key/value heads; got {heads!r}")
        size = world_size if self.size == "auto" else self.size
        if world_size % size:
            raise ConfigError(
                f"{SECTION}.size must divide the number of ranks; got size {size} on {world_size} ranks, "
                f"use one of {divisors(world_size)}"
            )
        chosen = self.chosen_schedule
        self._check_own(chosen)
        resolved = dataclasses.replace(self, size=size, schedule=chosen.name)
        node = min(per_node or world_size, world_size)
        resolved = dataclasses.replace(resolved, ulysses=resolved._ulysses(heads, node))
        resolved = dataclasses.replace(resolved, schedule_options=resolved._shape(heads))
        chosen = chosen.at(size // resolved.ulysses, dict(resolved.schedule_options))
        resolved._check_choices(chosen)
        if self.layout == "auto":
            resolved = dataclasses.replace(resolved, layout=chosen.default_layout)
        if self.latent_attention == "latent" and self.head_chunks not in (1, "auto"):
            raise ConfigError(
                f'{SECTION}.latent_attention "latent" needs head_chunks 1, since a latent is of all heads; got '
                f'{self.head_chunks}, set one of them to "auto"'
            )
        resolved.topology(world_size)  # which raises for a wrong rank_order
        return resolved

    def _ulysses(self, heads: tuple[int, int] | None, per_node: int) -> int:
        """Return the configured size. For "auto", return the largest size that stays within a node, divides the heads
        equally, leaves each Ulysses rank a head in every head chunk, and gives a number of CP ranks that fits the
        schedule's own settings.
        """
        ulysses = self.ulysses if self.ulysses != "auto" else 1
        if self.size % ulysses:
            raise ConfigError(
                f"{SECTION}.ulysses must divide {SECTION}.size; got ulysses {ulysses}, size {self.size}, "
                f"use one of {divisors(self.size)}"
            )
        if heads is None:
            return ulysses
        head_chunks = 1 if self.head_chunks == "auto" else self.head_chunks
        check_heads(ulysses, *heads, size=self.size, head_chunks=head_chunks)
        if self.ulysses != "auto":
            return ulysses
        legal = [ulysses for ulysses in even_ulysses(self.size, *heads, head_chunks) if per_node % ulysses == 0]
        for ulysses in reversed(legal):
            try:
                dataclasses.replace(self, ulysses=ulysses)._shape(heads)
            except ConfigError:
                if not self.schedule_options and ulysses == min(legal):
                    raise
                continue
            return ulysses
        shape = ", ".join(f"{name} {value}" for name, value in self.schedule_options)
        raise ConfigError(
            f"{SECTION}.{'/'.join(dict(self.schedule_options))} must fit the CP ranks, size / ulysses; got "
            f"{shape} for size {self.size}, whose ulysses sizes that divide {heads[0]} query and {heads[1]} "
            f"key/value heads equally are {legal}"
        )

    def _check_own(self, chosen: Schedule) -> None:
        """Raise ConfigError for a setting of another schedule."""
        known = schedules.settings()
        for name, _ in self.schedule_options:
            if (owner := known[name][1]) is not chosen:
                raise ConfigError(
                    f'{SECTION}.{name} belongs to schedule "{owner.name}"; got it with "{chosen.name}", '
                    f'set "schedule": "{owner.name}" or leave {name} out'
                )

    def _check_choices(self, chosen: Schedule) -> None:
        """Raise ConfigError for a value that this schedule does not accept; the message names schedules that do."""
        for name, legal in _choices(chosen).items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in ("auto", *legal):
                others = [n for n, s in schedules.SCHEDULES.items() if n != chosen.name and value in _choices(s)[name]]
                raise ConfigError(
                    f'{SECTION}.{name} must be {quoted_list(legal)} with schedule "{chosen.name}"; got "{value}", '
                    f"change it{f', or use schedule {quoted_list(others)}' if others else ''}"
                )

    def _shape(self, heads: tuple[int, int] | None) -> tuple[tuple[str, Value], ...]:
        """Return the schedule's own settings, with every "auto" replaced."""
        if heads:  # all Ulysses ranks must choose alike, so they choose for the one with the most heads
            heads = largest_share(*heads, self.ulysses)
        options, cp_size = dict(self.schedule_options), self.size // self.ulysses
        return tuple(self.chosen_schedule.shaped(cp_size, options, heads, self.layout).items())

    def section(self) -> dict[str, Any]:
        """Return a resolved config as the section of a DeepSpeed JSON: size, ulysses, schedule, and values other than
        the default. Settings that requested a plan are left out.
        """
        settings, defaults = self.settings(), SequenceParallelConfig().settings()
        section = {name: settings.pop(name) for name in ("size", "ulysses", "schedule")}
        cp_size, options = self.size // self.ulysses, dict(self.schedule_options)
        alone = options if cp_size == 1 else {}
        layout = self.chosen_schedule.at(cp_size, options).default_layout
        for name, value in settings.items():
            is_default = value == defaults[name] or (name == "layout" and value == layout)
            if not is_default and name not in (*PLAN_REQUESTS, *alone):
                section[name] = list(value) if isinstance(value, tuple) else value
        return section

    @property
    def cp_axes(self) -> Axes:
        """Return names and sizes of the axes of a resolved config's CP ranks, the fastest-numbered axis first."""
        return self.chosen_schedule.axes(self.size // self.ulysses, dict(self.schedule_options))

    def topology(self, world_size: int) -> Topology:
        """Return all ranks of the job as named axes, for a resolved config."""
        chosen, axes = self.chosen_schedule, self.cp_axes
        order, data = axis_order(axes, self.rank_order, chosen.rank_orders), world_size // self.size
        return Topology.of(axes, ulysses=self.ulysses, data=data, order=order, collective_axes=chosen.collective_axes)

    @property
    def asks_for_plan(self) -> bool:
        """Whether the planner must choose: `seq_len` or `machine` is given and one of `PLANNED` is "auto", or `memory`
        is "auto" and leaves settings open."""
        requested = any(getattr(self, name) != "auto" for name in PLANNED_FOR)
        shape = requested and isinstance(self.rank_order, str) and "auto" in (getattr(self, name) for name in PLANNED)
        return shape or bool(self.auto_fields)

    def kept(self, head_chunks: int, checkpointed: bool, keeps: bool) -> SavedForBackward:
        """Return what attention's forward saves for backward, for a resolved config.

        Args:
            head_chunks: Number of head chunks.
            checkpointed: Whether a checkpoint is around attention.
            keeps: Whether that checkpoint keeps attention's results.
        """
        chosen = self.save_qkv_after_all_to_all
        if chosen == "auto":  # not where head chunks are there to save memory, unless a checkpoint keeps the results
            chosen = head_chunks == 1 or self.overlap or (checkpointed and keeps)
        if self.ulysses == 1 or not chosen:  # without other Ulysses ranks nothing is exchanged
            return SavedForBackward.NOTHING
        return SavedForBackward.QKV if checkpointed else SavedForBackward.QKV_AND_OUT

    def recipe(self, topology: Topology) -> Recipe:
        """Return the Recipe from which a resolved config's programs are made."""
        return Recipe(
            schedule=self.chosen_schedule,
            topology=topology,
            forward=self.rotate_forward,
            backward=self.rotate_backward,
            overlap=self.overlap,
        )


@functools.cache
def _checker() -> TypeAdapter[SequenceParallelConfig]:
    return TypeAdapter(SequenceParallelConfig)


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings: the common ones and the schedules' own."""
    every = [field.name for field in dataclasses.fields(SequenceParallelConfig)]
    if twice := [name for name in every if name in schedules.settings()]:
        raise ConfigError(f"a schedule's settings need names of their own; got {', '.join(twice)}, rename it")
    return (*(name for name in every if name not in ("schedule_options", "auto_fields")), *schedules.settings())


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError for a setting that does not exist, naming the nearest one that does."""
    known = setting_names()
    for name in names:
        if name not in known:
            guess = did_you_mean(str(name), known)
            needed = "that exists" if guess else f"of {', '.join(known)}"
            raise ConfigError(f'a setting of "{SECTION}" must be one {needed}; got {name!r}{guess}')


def _choices(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Return the words that a schedule accepts for each common setting whose values are words."""
    sides = ("auto", *schedule.moving_sides)
    return {
        "layout": schedule.layouts,
        "rotate_forward": sides,
        "rotate_backward": sides,
        "rank_order": tuple(schedule.rank_orders),
    }


HOST_PIECE = 2**26  # bytes of the host tensors that offloaded checkpoints are copied into; the last may be smaller


def most_logits(vocab: int, hidden: int) -> int:
    """Return the maximum bytes of a tile's fp32 logits with loss_tiles "auto": a quarter of the head's fp32 gradient,
    which exists at the same time, and at most 256 MiB.
    """
    return min(2**28, vocab * hidden)


def check_length(config: SequenceParallelConfig, seq: int) -> None:
    """Raise InputError, naming the next length that fits, unless a sequence of `seq` tokens can be shared."""
    step = layouts.multiple(config.layout, config.size, config.ulysses)
    if seq < 1 or seq % step:
        fits = max(1, -(-seq // step)) * step
        raise InputError(
            f"a sequence's length must be a multiple of {step} for the {config.layout} layout on {config.size} "
            f"ranks with ulysses {config.ulysses}; got {seq}, pad it (on the right) to {fits}, or share it by "
            "sp.place(length), which has a mask and shards for attention"
        )
