"""Options shared by `memory`, `plan` and `tune`: model, length, ranks, machine and DeepSpeed JSON."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from typing import Any

from ..base.errors import SECTION, ConfigError, did_you_mean
from ..base.files import parse_json, read_text, shown
from ..core.settings import PLAN_REQUESTS, SequenceParallelConfig, setting_names
from ..deepspeed.config import DECISIVE, DeepSpeedJson, autos
from ..planner import limits
from ..planner.machine import Machine
from ..planner.request import Images, Job, Model, Request

# the DeepSpeed JSON if --config is not given; the learning rate affects only the printed JSON
DEFAULTS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},  # torch's AdamW needs no compilation
    "zero_optimization": {"stage": 3},
}
GIB = 2**30
MOST_GIB = 2**40  # maximum value of --memory
DIGITS = 18  # maximum number of digits of a number on the command line, so that products of three numbers are finite
UNITS = {"K": 2**10, "M": 2**20}
UNITS_HELP = "or with K (1,024) or M (1,048,576) after it"


class Told(Exception):
    """Raised if the command has failed and a rank has already printed the reason."""


def add_options(parser: argparse.ArgumentParser, machine: str, units: str) -> None:
    """Add the options that the commands share.

    `machine` is the help text for `--machine`, and `units` names the units in the `--json` output.
    """
    parser.add_argument("--model", required=True, metavar="PLACE", help="folder of a model, or its config.json")
    parser.add_argument("--seq-len", metavar="N", help=f"tokens of the whole sequence, {UNITS_HELP}")
    add_settings(parser)
    parser.add_argument("--no-checkpointing", action="store_true", help="without gradient checkpointing")
    parser.add_argument("--machine", metavar="NAME", help=f"{machine}, or a JSON file")
    parser.add_argument("--memory", metavar="GIB", help="of a rank, for tensors; default: the machine's")
    parser.add_argument("--json", action="store_true", help=f"print JSON; {units}")


def add_lengths(parser: argparse.ArgumentParser) -> None:
    help = "lengths of an optimizer step's samples: answer for a run with tokens_per_rank (docs/lengths.md)"
    parser.add_argument("--lengths", metavar="FILE", help=help)


def add_images(parser: argparse.ArgumentParser) -> None:
    help = "images, tiles of them, frames or audio of each sequence, whose tokens are among those of --seq-len"
    parser.add_argument("--images", metavar="N", help=help)
    parser.add_argument("--image-tokens", metavar="N", help="of each; default: the config's, where all have as many")
    parser.add_argument("--image-patches", metavar="N", help="of each, that the tower computes; default: the config's")


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of ranks."""
    parser.add_argument("--ranks", metavar="P", help="ranks of the job; or say --nodes")
    parser.add_argument("--nodes", metavar="N", help="nodes of the job, all of whose ranks take part")
    parser.add_argument("--gpus-per-node", metavar="N", help="ranks of a node; default: the machine's")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options that `content_of` reads."""
    parser.add_argument(
        "--config", "--deepspeed_config", metavar="FILE", help="DeepSpeed JSON; without one bf16, ZeRO-3 and AdamW"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help=f'a setting of "{SECTION}"; with a dot one of the DeepSpeed JSON, as zero_optimization.stage=2',
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """A command's inputs, parsed from its options."""

    content: dict[str, Any]  # the DeepSpeed JSON, ready to paste
    counted: dict[str, Any]  # the JSON, with assumed values in place of "auto"
    filled: dict[str, Any]  # assumed values by key of the JSON
    config: SequenceParallelConfig  # from the section of the JSON
    model: Model
    seq: int  # number of tokens per sequence
    job: Job  # the model, the length, and the parts of the JSON that affect memory or time
    machine: Machine | None  # None if no machine is named
    memory: int | None  # memory per rank in bytes; None to use the machine's memory
    world: int  # ranks of the job
    per_node: int | None  # ranks per node; None if unknown
    lengths: tuple[int, ...] = ()  # lengths of the samples in an optimizer step, which form packs

    @classmethod
    def of(cls, args: argparse.Namespace, seq: int | None = None, machine: Machine | None = None) -> Inputs:
        """Parse the options.

        Args:
            args: The parsed options.
            seq: The length in tokens if the options specify no length.
            machine: The machine if neither the options nor the section name a machine.

        Raises:
            ConfigError: The options or settings are invalid.
        """
        content = content_of(args)
        config = SequenceParallelConfig.from_dict(DeepSpeedJson.read(content).section)
        named = args.machine if args.machine is not None or config.machine == "auto" else config.machine
        loaded = machine if named is None else Machine.load(named)
        per_node = None if args.gpus_per_node is None else count("--gpus-per-node", args.gpus_per_node)
        if loaded is not None and per_node is not None:
            loaded = dataclasses.replace(loaded, per_node=per_node)
        per_node = loaded.per_node if loaded else per_node
        world, lengths = _world(args, per_node), tuple[int, ...]()
        seq = seq or (None if config.seq_len == "auto" else config.seq_len)
        seq = seq if args.seq_len is None else tokens("--seq-len", args.seq_len)
        if getattr(args, "lengths", None) is not None:
            lengths, seq = lengths_in("--lengths", args.lengths), _pack(args, config, world)
            limits.check("the samples of a step", len(lengths), limits.MAX_DOCUMENTS)
        if seq is None:
            raise ConfigError(
                "memory, plan and tune need --seq-len N; plan and tune take --documents FILE too, with the lengths of "
                "those of a sequence; got none of them"
            )
        from ..models import numbers_of  # imported here, since torch takes seconds to import

        model, counted = numbers_of(args.model), copy.deepcopy(content)
        filled = fill_in(counted, model.hidden)
        job = Job.of(DeepSpeedJson.read(counted, args.config))
        images = _images(args, model, seq)
        job = dataclasses.replace(job, model=model, seq=seq, checkpointing=not args.no_checkpointing, images=images)
        return cls(
            content=content, counted=counted, filled=filled, config=config, model=model, seq=seq, job=job,
            machine=loaded,
            memory=None if args.memory is None else gibibytes("--memory", args.memory),
            per_node=per_node, world=world, lengths=lengths,
        )  # fmt: skip

    def require_machine(self, args: argparse.Namespace) -> None:
        """Raise ConfigError if `--memory` is given without a machine."""
        if self.memory is not None and args.machine is None and self.config.machine == "auto":
            raise ConfigError("--memory is of a machine's rank; got no machine, say --machine too")

    @property
    def per_rank(self) -> int:
        """The maximum number of tokens per rank in a pack."""
        assert self.config.tokens_per_rank != "auto"
        return self.config.tokens_per_rank

    def request(self, job: Job | None = None) -> Request:
        """Return the planner's request for the settings that are not set in the section, on the named machine."""
        assert self.machine is not None
        job = job or self.job
        given = {name: value for name, value in self.content.get(SECTION, {}).items() if name not in PLAN_REQUESTS}
        free = self.config.size == "auto" and job.sequences is not None
        sizes = job.sizes(self.world) if free else ()
        return Request(job=job, machine=self.machine, world=self.world, given=given, sizes=sizes, memory=self.memory)


def _pack(args: argparse.Namespace, config: SequenceParallelConfig, world: int) -> int:
    """Return the maximum number of tokens in a pack for `--lengths`."""
    if args.seq_len is not None or getattr(args, "documents", None) is not None:
        raise ConfigError("--lengths says how long samples are; got --seq-len or --documents too, leave them out")
    if config.tokens_per_rank == "auto" or config.auto_fields:
        raise ConfigError(
            "--lengths is of a run with tokens_per_rank, whose memory settings are given; got "
            f"{'no tokens_per_rank' if config.tokens_per_rank == 'auto' else 'memory auto'}, say --set "
            f"tokens_per_rank=16384, and each memory setting"
        )
    return config.tokens_per_rank * (world if config.size == "auto" else config.size)


def _images(args: argparse.Namespace, model: Model, seq: int) -> Images | None:
    """Return the images in a sequence of `seq` tokens, or None without `--images`."""
    names = ("--images", "--image-tokens", "--image-patches")
    values = [getattr(args, name.strip("-").replace("-", "_"), None) for name in names]
    number, of_each, patches = (text and tokens(name, text) for name, text in zip(names, values, strict=True))
    tower = model.tower
    if number is None and of_each is None and patches is None:
        return None
    if number is None or tower is None or getattr(args, "lengths", None) is not None:
        got = "a model without a tower" if tower is None else "--lengths" if number else "no --images"
        raise ConfigError(f"--images is of models with a tower, for a sequence; got {got}, leave one of them out")
    of_each = of_each or tower.tokens
    patches = patches or (of_each and tower.patches_a_token and of_each * tower.patches_a_token) or tower.patches
    if not of_each or not patches:
        missing = names[1] if not of_each else names[2]
        raise ConfigError(f"--images needs {missing}, because the model's config gives no fixed number; got none")
    if number * of_each > seq:
        raise ConfigError(f"--images must fit {seq} tokens; got {number} of {of_each} tokens, raise --seq-len")
    return Images(number, of_each, patches)


def _world(args: argparse.Namespace, per_node: int | None) -> int:
    """Return the number of ranks in the job. `per_node` is the number of ranks per node, if known."""
    if args.ranks is not None and args.nodes is not None:
        raise ConfigError(
            f"--ranks or --nodes says the ranks of a job; got both, {args.ranks:.60} and {args.nodes:.60}"
        )
    if args.ranks is not None:
        world = count("--ranks", args.ranks)
    elif per_node is not None:
        world = per_node * (1 if args.nodes is None else count("--nodes", args.nodes))
    else:
        raise ConfigError("memory needs --ranks P, or --nodes N and a node's ranks, by --gpus-per-node or --machine")
    limits.check("the ranks of a job, nodes x ranks a node,", world, limits.MAX_RANKS)
    return world


def count(name: str, text: str, units: bool = False) -> int:
    """Parse the positive integer in an option. With `units`, the suffixes K and M are allowed.

    Raises:
        ConfigError: The text is not a positive integer.
    """
    unit = UNITS.get(text[-1:].upper(), 1) if units else 1
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or len(digits) > DIGITS or int(digits) < 1:
        form = UNITS_HELP if units else f"of at most {DIGITS} digits"
        raise ConfigError(f"{name} must be a whole number from 1, {form}; got {text!r:.60}")
    return int(digits) * unit


def tokens(name: str, text: str) -> int:
    """Parse a number of tokens, such as 131072 or 128K. Raises the same error as `count`."""
    number = count(name, text, units=True)
    limits.check(name, number, limits.MAX_TOKENS)
    return number


def lengths_in(name: str, file: str) -> tuple[int, ...]:
    """Return the lengths in an option's file, which contains integers separated by spaces or newlines.

    Raises:
        ConfigError: The file contains anything else.
    """
    words = read_text(file, name).split()
    invalid = (word for word in words or ["nothing"] if not (word.isdecimal() and len(word) <= DIGITS and int(word)))
    if (word := next(invalid, None)) is not None:
        raise ConfigError(
            f"{name} must be a file of lengths, whole numbers from 1 of at most {DIGITS} digits; {file} has "
            f"{word!r:.60}"
        )
    return tuple(map(int, words))


def gibibytes(name: str, text: str) -> int:
    """Convert an option in GiB to bytes. Raise ConfigError unless the value is a positive number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST_GIB:
        raise ConfigError(f"{name} must be a number above 0, at most {MOST_GIB}; got {text!r:.60}")
    return int(number * GIB)


def content_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed JSON with the values from `--set`. Raise ConfigError if DeepSpeed rejects the JSON."""
    content = copy.deepcopy(DEFAULTS) if args.config is None else dict(DeepSpeedJson.read(args.config).content)
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set must be KEY=VALUE; got {text!r}")
        *sections, key = name.split(".")
        if not sections and key not in (known := setting_names()):
            raise ConfigError(f'--set knows the settings of "{SECTION}"; got {key!r}{did_you_mean(key, known)}')
        inside = content
        for section in sections or [SECTION]:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                raise ConfigError(f"--set {name} needs an object {section!r}; the configuration has {shown(inside)}")
        inside[key] = parse_json(value, "a value", f"--set {name}", or_text=True)
    given = DeepSpeedJson.read(content, args.config)
    if args.config is not None or any("." in text.partition("=")[0] for text in args.set):
        given.check()  # importing DeepSpeed takes seconds
    zero = given.known.zero_optimization
    if zero.optimizer_away and content.get("optimizer") == DEFAULTS["optimizer"]:
        # with offloading to the host, DeepSpeed's own AdamW is many times faster
        del content["optimizer"]["params"]["torch_adam"]
    if zero.offload_optimizer.super_offload:
        raise ConfigError(
            "memory and plan know offload_optimizer without super_offload; got super_offload true, leave it out"
        )
    return content


def fill_in(content: dict[str, Any], hidden: int) -> dict[str, Any]:
    """Replace each "auto" that affects memory with an assumed value, and return the assumed values by key.

    Bucket sizes are computed from the model, as in the Trainer. All other values, which the Trainer would read from its
    arguments, are set to common defaults.
    """
    assumed = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16.enabled": content.get("fp16", {}).get("enabled") is not True,
        "fp16.enabled": not content.get("bf16", {}).get("enabled"),
        "zero_optimization.reduce_bucket_size": hidden * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
    }
    filled = {}
    for name, value in assumed.items():
        section, _, key = name.rpartition(".")
        inside = content.get(section, {}) if section else content
        if inside.get(key) == "auto":
            inside[key] = filled[name] = value
    if open_keys := [key for key in autos(content) if key in DECISIVE]:
        raise ConfigError(f'memory depends on {open_keys[0]}, which no Trainer computes; got "auto", write its value')
    return filled
