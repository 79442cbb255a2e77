"""The user's settings: the `"sequence_parallel"` section of a DeepSpeed JSON, as a frozen dataclass."""

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

CONFIGURATION = "sequence parallel configuration"  # name used in messages about what ranks agree on
UNREADABLE = "SequenceParallel needs a configuration that can be read; reading it"
if TYPE_CHECKING:
    Count: TypeAlias = int | Any  # "auto" until `resolve` has chosen a number
else:
    Count = Annotated[int, Field(ge=1)] | Literal["auto"]
AxisNames: TypeAlias = Annotated[tuple[str, ...], Strict(False)]  # also accepts a list
Rotate: TypeAlias = Literal["auto", "kv", "q"]
CommDtype: TypeAlias = Literal["fp32", "bf16"]

LAYOUTS = tuple(layout.name for layout in layouts.COMMON)
ROTATES, COMM_DTYPES = get_args(Rotate), get_args(CommDtype)
PLANNED_FOR = ("seq_len", "machine")  # settings that describe the target of a plan
PLANNED = ("size", "ulysses", "schedule", "head_chunks")  # if none of these is "auto", there is nothing to plan
# settings that save memory
MEMORY_SETTINGS = (
    "loss_tiles",
    "mlp_tiles",
    "head_chunks",
    "save_qkv_after_all_to_all",
    "offload_checkpoints",
    "recompute_attention",
)
PLAN_REQUESTS = (*PLANNED_FOR, "memory")  # settings that request a plan, and are not part of the plan


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The allowed values of a setting, including registered values. `read` checks values that begin with one of the
    prefixes.
    """

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
    """Settings for sharing one sequence among `size` ranks. Names are the same as in the `"sequence_parallel"` section.

    Every setting has a default. Most settings default to `"auto"`, which `resolve` replaces. A schedule's own settings
    (`rows`, `ring_size`, ...) are used in the same way as the settings below. To list them, run `python -m ds_seqpar
    show --help`.

    Args:
        schedule_options: The schedule's own settings, by name. These settings may also be passed as keyword arguments.
        auto_fields: Settings that `memory="auto"` must still choose. Defaults to all memory settings that are not
            given.
        **settings: The settings below, and schedules' own settings.

    Raises:
        ConfigError: A setting does not exist, or has a value that is invalid regardless of other settings.
    """

    __pydantic_config__ = STRICT

    size: Count = "auto"
    """Number of ranks that share one sequence (P). `"auto"` uses all ranks in the job."""
    ulysses: Count = "auto"
    """Number of ranks that exchange tokens for heads in an all-to-all (U), at most the number of query heads. The
    schedule runs on `size / ulysses` ranks. `"auto"` selects the largest U that divides `size`, divides the heads
    evenly and fits the schedule's shape, or 1 if the number of heads is unknown."""
    schedule: Annotated[
        str, OneOf("schedule", lambda: ("auto", *schedules.SCHEDULES), schedules.READERS, schedules.schedule)
    ] = "auto"
    """Schedule for the `size / ulysses` ranks: a built-in schedule, a registered schedule, or a plan in a file. Plans
    can be printed with `show --plan` or written by hand. `"auto"` selects `"ring"`."""
    layout: Annotated[str, OneOf("layout", lambda: ("auto", *layouts.LAYOUTS))] = "auto"
    """How tokens are assigned to ranks. `"contiguous"` assigns consecutive tokens to each rank. `"zigzag"` assigns
    chunks r and 2A-1-r of 2A chunks to rank r, which balances causal work in every step. `"striped"` assigns every A-th
    token to the same rank (Striped Attention). `"balanced"` divides packed documents into shares with equal work, and
    is the same as `"zigzag"` for a single document. `"auto"` selects the schedule's own layout, usually
    `"balanced"`."""
    rotate_forward: Rotate = "auto"
    """Operand that rotates in the forward pass: `"kv"`, or `"q"` with its partial results. `"auto"` selects the operand
    for which fewer bytes are sent."""
    rotate_backward: Rotate = "auto"
    """Operand that rotates in the backward pass: `"kv"` with its gradients, or `"q"` with the output's gradient and dq.
    `"auto"` selects the operand for which fewer bytes are sent."""
    overlap: bool = False
    """Send single blocks instead of using collectives, and compute products in the order in which operands arrive."""
    rank_order: AxisNames | Annotated[str, OneOf("rank_order", lambda: RANK_ORDERS)] = "auto"
    """Order of the rank axes, fastest-varying first, as a list of axis names or a preset. `"ulysses_intra"` (the choice
    of `"auto"`) keeps the Ulysses all-to-all within a node. `"collectives_intra"` keeps a schedule's gathers within a
    node, and `"ring_intra"` keeps a schedule's ring within a node (WallFacer)."""
    comm_dtype: CommDtype = "fp32"
    """Dtype of partial outputs and gradients sent between ranks: `"fp32"` (fp64 for fp64 inputs) or `"bf16"`. fp16 is
    not available, because the gradients of a mean loss over many tokens would underflow."""
    kernel: Annotated[str, OneOf("kernel", lambda: KERNELS)] = "auto"
    """Attention kernel. `"auto"` selects the first kernel that supports the call's blocks."""
    head_chunks: Count = 1
    """Number of chunks into which attention divides the heads, at most the number of key/value heads. Chunks are
    computed one after another, with buffers for a single chunk (Untied Ulysses). With `overlap`, a chunk's Ulysses
    exchanges run while another chunk is computed. With `"auto"`, the planner chooses the number if `seq_len` or
    `machine` is set. Otherwise, `"auto"` considers only numbers of chunks for which no additional bytes are sent, and
    selects the smallest number for which the buffers take no more memory than q, k, v and out."""
    recompute_attention: bool = False
    """With activation checkpointing, run attention and its communication again in the backward pass. If false,
    attention's results are kept, so attention runs only once per step (DistFlashAttn)."""
    save_qkv_after_all_to_all: bool | Literal["auto"] = "auto"
    """Save the q, k and v that the forward pass received in the Ulysses all-to-all. If false, the backward pass
    exchanges q, k and v again, which is slower but needs less memory. `"auto"` means false only if there are several
    `head_chunks`, `overlap` is off, and no checkpoint keeps attention's results."""
    offload_checkpoints: bool = False
    """Move tensors saved by activation checkpoints to host memory until the backward pass needs them."""
    mlp_tiles: Count = 1
    """Number of tiles into which a patched model divides a rank's tokens when it computes MLPs and norms (ALST). With
    `"auto"`, each rank chooses the number in each forward pass."""
    loss_tiles: Count = 1
    """Number of tiles into which a patched model divides a rank's tokens when it computes logits and the loss. With
    `"auto"`, each rank chooses the number in each forward pass."""
    seq_len: Count = "auto"
    """Length in tokens of the whole sequence for which `"auto"` settings are planned. If `machine` is set, `"auto"`
    uses the maximum length that a Trainer's data set reports."""
    tokens_per_rank: Count = "auto"
    """Maximum number of tokens per rank in a micro-batch. The samples of an optimizer step are packed into
    micro-batches of `tokens_per_rank * size` tokens. Short samples stay whole on one rank, and long samples are shared
    among ranks. `"auto"` leaves batches unchanged."""
    machine: Annotated[str, Field(min_length=1)] = "auto"
    """Machine for which `"auto"` settings are planned: the name of a preset, or a JSON file with the machine's rates,
    links and memory. If `seq_len` is set, `"auto"` uses the devices and hosts that the ranks detect."""
    memory: Literal["given", "auto"] = "given"
    """With `"auto"`, choose the fastest combination of `head_chunks`, `recompute_attention`,
    `save_qkv_after_all_to_all`, `offload_checkpoints`, `mlp_tiles` and `loss_tiles` that fits in memory. Settings with
    explicit values keep those values."""
    agreement: Literal["auto", "always"] = "auto"
    """When ranks check that they are about to run the same call. With `"auto"` on CPUs, every call is checked before
    anything is sent. With `"auto"` on accelerators, a call is checked beforehand only if it differs from all earlier
    calls. All other calls on accelerators are checked at the end of each step, when the hosts wait for one another
    once. With `"always"`, every call on any device is checked beforehand."""
    recurrent_layers: Literal["auto", "heads", "states"] = "auto"
    """How ranks share recurrent layers, such as Mamba-2 layers. With `"heads"`, Ulysses ranks exchange heads, and each
    CP rank passes states to the next CP rank. With `"states"`, every rank passes states to the next rank. `"auto"`
    selects the option for which fewer bytes are sent."""
    latent_attention: Literal["auto", "expanded", "latent"] = "auto"
    """What latent attention (MLA) sends for each token. `"latent"` sends the latent vector, which every receiving rank
    expands. `"expanded"` sends expanded keys and values. `"auto"` selects `"latent"`, unless the latent vector is no
    smaller than the keys and values, CP ranks have fewer tokens than the latent vector has elements, or there are
    several `head_chunks`."""
    shared_prompts: Literal["auto"] | bool = "auto"
    """Whether a prompt at the start of several rows is computed only once. The setting applies to calls that request
    per-token values, such as calls from trl's trainers. With `"auto"`, prompts are shared if the model supports sharing
    and if sharing saves at least a tenth of the tokens. With `true`, prompts are always shared, and an error is raised
    if the model does not support sharing."""
    divide_media: Literal["auto"] | bool = "auto"
    """Whether images, video frames and audio clips are divided among ranks, so that each rank computes the features for
    its own share. With `"auto"`, media are divided if a small copy of the model shows that an item's features do not
    depend on other items. With `true`, an error is raised if a model's media cannot be divided. With `false`, every
    rank computes all features."""
    prove: Literal["auto", "always", "never"] = "auto"
    """Whether to compare unsharded and sequence-parallel results on a small copy of a transformers model before the
    model is patched. With `"auto"`, model families covered by the repository's tests are skipped."""
    doctor: bool = False
    """Whether `initialize` and the Trainer check the job before the first step, which takes a few seconds. The checks
    cover ranks, links, kernels, attention, and a small copy of the model with its loss, its gradients and an optimizer
    step."""
    max_ctas: Count = "auto"
    """Maximum number of thread blocks that a communication operation uses on NVIDIA GPUs. Each thread block occupies
    one SM, which concurrent computation then cannot use. `"auto"` uses NCCL's own number, up to 32."""
    watchdog: Literal["end", "report"] = "end"
    """What the watchdog does after it reports which ranks have waited for other ranks for `watchdog_s` seconds. With
    `"end"`, the job ends. With `"report"`, the ranks continue to wait."""
    watchdog_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Number of seconds that a rank waits for other ranks before the watchdog acts. `"auto"` uses half the process
    groups' timeout, but at least 60 seconds."""
    check_finite: bool = False
    """Whether to check for NaN and inf and report where the first one appears. The check waits for the device in each
    layer."""
    schedule_options: tuple[tuple[str, Any], ...] = ()
    """The schedule's own settings that are not `"auto"`, sorted by name."""
    auto_fields: tuple[str, ...] = ()
    """Settings that `memory="auto"` must still choose."""

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
        if name in schedules.settings():  # a setting of a schedule
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
        """The configured schedule, or the schedule that "auto" selects."""
        return schedules.schedule(self.schedule)

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> SequenceParallelConfig:
        """Read the `"sequence_parallel"` section. Raise ConfigError for an unknown key, suggesting the closest
        match.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{SECTION}" must be an object such as {{"size": 4, "ulysses": 2}}; got {section!r}')
        check_names(section)
        return cls(**section)

    def resolve(
        self, world_size: int, heads: tuple[int, int] | None = None, per_node: int | None = None
    ) -> SequenceParallelConfig:
        """Return the same settings with every `"auto"` replaced, except for the numbers of tiles, which are chosen in
        each forward pass.

        Args:
            world_size: Number of ranks in the job.
            heads: Tuple (number of query heads, number of key/value heads) of the model, if known.
            per_node: Number of ranks per node, so that "auto" keeps `ulysses` within a node. If None, "auto" ignores
                nodes.

        Raises:
            ConfigError: `size` does not divide the world size, `ulysses` does not divide `size`, or `ulysses` is not
                compatible with the number of heads.
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
        resolved.topology(world_size)  # raises if rank_order is invalid
        return resolved

    def _ulysses(self, heads: tuple[int, int] | None, per_node: int) -> int:
        """Return the configured Ulysses size, or the size that "auto" selects.

        "auto" selects the largest size that stays within a node, divides the heads equally, and gives each Ulysses rank
        a head in every head chunk. The resulting number of CP ranks must fit the schedule's own settings.
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
        """Raise ConfigError if a setting belongs to another schedule."""
        known = schedules.settings()
        for name, _ in self.schedule_options:
            if (owner := known[name][1]) is not chosen:
                raise ConfigError(
                    f'{SECTION}.{name} belongs to schedule "{owner.name}"; got it with "{chosen.name}", '
                    f'set "schedule": "{owner.name}" or leave {name} out'
                )

    def _check_choices(self, chosen: Schedule) -> None:
        """Raise ConfigError if this schedule does not support a value, suggesting schedules that do."""
        for name, legal in _choices(chosen).items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in ("auto", *legal):
                others = [n for n, s in schedules.SCHEDULES.items() if n != chosen.name and value in _choices(s)[name]]
                raise ConfigError(
                    f'{SECTION}.{name} must be {quoted_list(legal)} with schedule "{chosen.name}"; got "{value}", '
                    f"change it{f', or use schedule {quoted_list(others)}' if others else ''}"
                )

    def _shape(self, heads: tuple[int, int] | None) -> tuple[tuple[str, Value], ...]:
        """Return the schedule's own settings with every "auto" replaced."""
        if heads:  # all Ulysses ranks make the same choice as the busiest rank
            heads = largest_share(*heads, self.ulysses)
        options, cp_size = dict(self.schedule_options), self.size // self.ulysses
        return tuple(self.chosen_schedule.shaped(cp_size, options, heads, self.layout).items())

    def section(self) -> dict[str, Any]:
        """Return a resolved config as a section of a DeepSpeed JSON, with size, ulysses, schedule and all non-default
        values.

        Settings that requested a plan are omitted.
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
        """The names and sizes of the axes of a resolved config's CP ranks, fastest-varying axis first."""
        return self.chosen_schedule.axes(self.size // self.ulysses, dict(self.schedule_options))

    def topology(self, world_size: int) -> Topology:
        """Return all ranks in the job as named axes, for a resolved config."""
        chosen, axes = self.chosen_schedule, self.cp_axes
        order, data = axis_order(axes, self.rank_order, chosen.rank_orders), world_size // self.size
        return Topology.of(axes, ulysses=self.ulysses, data=data, order=order, collective_axes=chosen.collective_axes)

    @property
    def asks_for_plan(self) -> bool:
        """Whether the settings request a plan.

        A plan is requested if `seq_len` or `machine` is given and a setting in `PLANNED` is "auto". A plan is also
        requested if `memory` is "auto" and some memory settings are still to be chosen.
        """
        requested = any(getattr(self, name) != "auto" for name in PLANNED_FOR)
        shape = requested and isinstance(self.rank_order, str) and "auto" in (getattr(self, name) for name in PLANNED)
        return shape or bool(self.auto_fields)

    def kept(self, head_chunks: int, checkpointed: bool, keeps: bool) -> SavedForBackward:
        """Return which tensors attention saves for the backward pass under a resolved config.

        Args:
            head_chunks: Number of head chunks.
            checkpointed: Whether attention runs inside a checkpoint.
            keeps: Whether the checkpoint keeps attention's results.
        """
        chosen = self.save_qkv_after_all_to_all
        if chosen == "auto":  # false if head chunks save memory, unless a checkpoint keeps the results
            chosen = head_chunks == 1 or self.overlap or (checkpointed and keeps)
        if self.ulysses == 1 or not chosen:  # with a single Ulysses rank, nothing is exchanged
            return SavedForBackward.NOTHING
        return SavedForBackward.QKV if checkpointed else SavedForBackward.QKV_AND_OUT

    def recipe(self, topology: Topology) -> Recipe:
        """Return the Recipe from which a resolved config's programs are built."""
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
    """Return the names of all settings: the common settings and the schedules' own settings."""
    every = [field.name for field in dataclasses.fields(SequenceParallelConfig)]
    if twice := [name for name in every if name in schedules.settings()]:
        raise ConfigError(f"a schedule's settings need names of their own; got {', '.join(twice)}, rename it")
    return (*(name for name in every if name not in ("schedule_options", "auto_fields")), *schedules.settings())


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError for a setting that does not exist, suggesting the closest match."""
    known = setting_names()
    for name in names:
        if name not in known:
            guess = did_you_mean(str(name), known)
            needed = "that exists" if guess else f"of {', '.join(known)}"
            raise ConfigError(f'a setting of "{SECTION}" must be one {needed}; got {name!r}{guess}')


def _choices(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Return the values that a schedule supports, for each common setting with named values."""
    sides = ("auto", *schedule.moving_sides)
    return {
        "layout": schedule.layouts,
        "rotate_forward": sides,
        "rotate_backward": sides,
        "rank_order": tuple(schedule.rank_orders),
    }


HOST_PIECE = 2**26  # bytes per host tensor for offloaded checkpoints; the last tensor may be smaller


def most_logits(vocab: int, hidden: int) -> int:
    """Return the maximum size in bytes of a tile's fp32 logits if `loss_tiles` is "auto".

    The maximum is a quarter of the size of the head's fp32 gradient, which is in memory at the same time, but at most
    256 MiB.
    """
    return min(2**28, vocab * hidden)


def check_length(config: SequenceParallelConfig, seq: int) -> None:
    """Raise InputError if a sequence of `seq` tokens cannot be shared. The message names the next valid length."""
    step = layouts.multiple(config.layout, config.size, config.ulysses)
    if seq < 1 or seq % step:
        fits = max(1, -(-seq // step)) * step
        raise InputError(
            f"a sequence's length must be a multiple of {step} for the {config.layout} layout on {config.size} "
            f"ranks with ulysses {config.ulysses}; got {seq}, pad it (on the right) to {fits}, or share it by "
            "sp.place(length), which has a mask and shards for attention"
        )
