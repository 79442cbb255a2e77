"""Support for trl's GRPO and RLOO. A group of ranks generates and scores each completion once, then trains on it.

trl's methods run unchanged, except for the accelerate functions that they call directly. The accelerate functions would
count ranks. They are replaced with versions that count groups, since a group of ranks takes the place of one process.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_seqpar.base.errors import CommunicationError, ConfigError, InputError, whole_number
from ds_seqpar.base.fingerprint import Fingerprint
from ds_seqpar.base.log import log_once
from ds_seqpar.data.random_states import unchanged
from ds_seqpar.guards.agreement import all_gather_objects, together

from .. import compat
from ..families import patch_of, unwrapped
from ..generation import zero
from ..inputs import MEDIA, TYPES
from ..model.patch import whole_sequences
from ..rebinding import globals_read, rebound
from . import rng_state

ROLLOUTS = ("GRPOTrainer", "RLOOTrainer")  # trl trainers that train on their own generations
# by attribute of these trainers, the argument that would make ranks generate separate completions
GENERATED_ELSEWHERE = {
    **{name: name for name in ("rollout_func", "tools", "use_transformers_continuous_batching")},
    "environment_factories": "environment_factory",
}
# by field of GenerationConfig, the values with which generation ignores padding before a prompt
PADDING_UNREAD = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (None, 1.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), (None, 0)),
}
Behind: Any = object  # a stand-in for the next class, on which type checkers allow any attribute


def rolls_out(trainer: Any) -> bool:
    """Return whether a Trainer trains on its own generations."""
    return base_of_trl(type(trainer), *ROLLOUTS) is not None


def base_of_trl(trainer_class: type, *names: str) -> type | None:
    """Return the trl class that has one of the given names among a class and its bases, or None if there is none."""
    bases = (x for x in trainer_class.__mro__ if x.__name__ in names and x.__module__.startswith("trl."))
    return next(bases, None)


def check_length(trainer: Any, group_generation_over: object) -> None:
    """Raise ConfigError for a `group_generation_over` that is not a length, or that would have no effect."""
    if group_generation_over is None:
        return
    if (whole_number(group_generation_over) or 0) < 1:
        raise ConfigError(f"group_generation_over must be a whole number from 1; got {group_generation_over!r}")
    if not rolls_out(trainer):
        raise ConfigError(
            f"group_generation_over is of trl's {' and '.join(ROLLOUTS)}; got a {type(trainer).__name__}, leave it out"
        )


def check(trainer: Any) -> None:
    """Check the arguments of GRPO and RLOO trainers before use.

    Raises:
        ConfigError: Completions would not be divided among the ranks of a group.
    """
    classes, of_trl = [*type(trainer).__mro__], base_of_trl(type(trainer), *ROLLOUTS)
    assert of_trl is not None
    compat.check_rollouts(of_trl)
    for base in classes[classes.index(Rollouts) + 1 : classes.index(of_trl)]:
        if own := sorted({*compat.REBOUND} & {*vars(base)}):
            raise ConfigError(
                f"a class between SequenceParallelMixin and trl's trainer must not have a method {own[0]}, whose "
                f"super() would count ranks; got {base.__name__}, list SequenceParallelMixin behind it"
            )
    given = [argument for name, argument in GENERATED_ELSEWHERE.items() if getattr(trainer, name, None)]
    if trainer.use_vllm and trainer.vllm_mode != "server":
        given.append(f"vllm_mode={trainer.vllm_mode!r}")
    if given:
        raise ConfigError(
            "sequence parallel GRPO and RLOO need completions of the model's own generate, or of vLLM in server mode; "
            f"got {', '.join(given)}, leave {'them' if len(given) > 1 else 'it'} out"
        )
    if trainer.use_vllm and compat.is_vlm(trainer):
        raise ConfigError(
            "sequence parallel GRPO and RLOO need prompts of text where vLLM completes them; got a processor of images "
            "too, give its tokenizer as processing_class, or leave use_vllm out"
        )


def check_together(trainer: Any) -> None:
    """Raise ConfigError if the ranks of a group would share a cache but the policy has layers with a state.

    Layers with a state do not support a shared cache. `generate` would also raise an error, but not before the first
    step.
    """
    inner, parts = unwrapped(trainer.model), trainer.accelerator.state.deepspeed_plugin.zero_stage == 3
    given = [f"group_generation_over={over}"] if (over := trainer.group_generation_over) is not None else []
    given += ["ds3_gather_for_generation=False"] if parts and not trainer.args.ds3_gather_for_generation else []
    if not given or trainer.sp.size == 1 or trainer.use_vllm:
        return
    uncached = patch_of(inner).facts.uncached
    if uncached and compat.generation_config_of(inner)(trainer.generation_config)[0].use_cache:
        raise ConfigError(
            "rows that the ranks of a group generate together need a policy without "
            f"{uncached}, or generation_kwargs={{'use_cache': False}}; got {given[0]} and a "
            f"{type(inner).__name__}, leave that out"
        )


def count_groups(args: Any, groups: int) -> None:
    """Change the arguments of GRPO and RLOO trainers, in which trl has counted ranks, to count groups of ranks.

    `generation_batch_size` is recomputed from `steps_per_generation` and the number of groups.

    Raises:
        ConfigError: A generation would not contain all completions for its prompts.
    """
    rows, of_prompt = args.per_device_train_batch_size, args.num_generations
    counted, args.generation_batch_size = args.generation_batch_size, rows * groups * args.steps_per_generation
    if counted != args.generation_batch_size:
        log_once(
            f"sequence_parallel: generation_batch_size is {args.generation_batch_size}, of {rows} rows x {groups} "
            f"groups x {args.steps_per_generation} steps_per_generation; with ranks for groups it was {counted}"
        )
    if args.generation_batch_size % of_prompt:
        raise ConfigError(
            f"per_device_train_batch_size x groups of ranks x steps_per_generation must be divisible by "
            f"num_generations, {of_prompt}; got {rows} x {groups} x {args.steps_per_generation}, since a group "
            "replaces one process"
        )
    rows, of_prompt = args.per_device_eval_batch_size, args.num_generations_eval or of_prompt
    if args.do_eval and args.eval_strategy != "no" and rows * groups % of_prompt:
        raise ConfigError(
            "per_device_eval_batch_size x groups of ranks must be divisible by the generations of a prompt in "
            f"evaluation, {of_prompt}; got {rows} x {groups}, since a group replaces one process"
        )


def check_row(row: Any) -> None:
    """Raise ConfigError for a data set row without a prompt."""
    if "prompt" not in row:
        raise ConfigError(f"GRPO and RLOO need a column prompt; got {', '.join(sorted(row))} alone, rename one")


class Rollouts(Behind):
    """The part of `SequenceParallelMixin` that extends the completion methods of trl's GRPO and RLOO trainers."""

    group_generation_over: int | None
    reward_funcs: list[Any]
    _throughput: Any
    _generations: tuple[object, int] = None, 0  # (step and mode, the number of generations so far)

    def _generate_single_turn(self, prompt_ids: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        if self.sp.size == 1 or self.use_vllm:
            return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)
        with self._divided_generation(images):
            return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)

    @contextlib.contextmanager
    def _divided_generation(self, images: list[list | None] | None) -> Iterator[None]:
        """Context manager in which the model's `generate` divides rows among the ranks of this group.

        Args:
            images: The images of each row, or None if there are none.
        """
        step, (last, count) = (self.state.global_step, self.model.training), self._generations
        self._generations = step, count + 1 if step == last else 0
        seed = functools.partial(Fingerprint.of, self.args.seed, *self._generations)
        inner = unwrapped(self.model)
        shared = inner.generate
        inner.generate = functools.partial(self._generate_divided, shared, seed, images)
        try:
            yield
        finally:
            inner.generate = shared

    def _generate_divided(
        self, shared: Callable[..., Tensor], seed: Callable[..., int], images: list[list | None] | None, *,
        input_ids: Tensor, attention_mask: Tensor, generation_config: Any, **fields: Any,
    ) -> Tensor:  # fmt: skip
        """Generate each row on one rank of the group, or on all ranks together if the row is too long.

        Args:
            shared: The patched model's `generate`.
            seed: A function that returns a random seed derived from its arguments.
            images: The images of each row, or None if there are none.
            input_ids: Prompts (rows, tokens) that are padded on the left, the same on all ranks of the group.
            attention_mask: A mask of the same shape.
            generation_config: transformers' generation config.
            **fields: Further outputs of a processor, for all rows.

        Returns:
            Prompts and completions (rows, tokens), on all ranks of the group.

        Raises:
            SeqParError: On all ranks of all groups, if any rank fails.
        """
        config, inner, group = generation_config, unwrapped(self.model), self.sp.groups.control
        most = self.group_generation_over
        lengths = (attention_mask.sum(1) + self.max_completion_length).tolist()
        # one rank alone would wait for the other ranks in each forward
        split = not self.args.ds3_gather_for_generation and bool(zero.split_parameters(inner))
        long = [row for row, length in enumerate(lengths) if split or (most is not None and length > most)]
        mine = sorted({*range(len(lengths))} - {*long})[dist.get_rank(group) :: dist.get_world_size(group)]

        def completions(generate: Callable[..., Tensor], rows: list[int], seed: int) -> dict[int, list[int]]:
            if not rows:
                return {}
            width = input_ids.shape[1]
            if all(getattr(config, name) in values for name, values in PADDING_UNREAD.items()):
                width = int(attention_mask[rows].sum(1).max())  # long prompts do not cause padding on other ranks
            ids, mask = (x[rows, -width:] for x in (input_ids, attention_mask))
            given = self._fields_of(rows, fields, images)
            given |= {name: given[name][:, -width:] for name in {*TYPES} & {*given}}
            with unchanged(), contextlib.nullcontext() if split else compat.without_zero_hooks(inner):
                torch.manual_seed(seed)
                # no step may wait for ranks that generate other rows or no rows
                given |= {"synced_gpus": False, "generation_config": config}
                ids = generate(input_ids=ids, attention_mask=mask, **given)
            return dict(zip(rows, ids[:, width:].tolist(), strict=True))

        world = self.sp.control_world
        with together(world, "generating completions", "completions", peers=group), whole_sequences(inner):
            own = completions(shared, mine, seed(dist.get_rank()))
        # a SeqParError concerns only this group, while other groups wait for its completions
        passing = CommunicationError, RuntimeError
        name = "completions of long prompts"
        with together(world, "generating completions", name, peers=group, passing=passing):
            by_row = completions(shared, long, seed("together", self.sp.data_rank))
        for _, others in all_gather_objects(group, ("completions", own)):
            by_row |= others
        width = max(map(len, by_row.values()))
        padded = [by_row[row] + [config.pad_token_id] * (width - len(by_row[row])) for row in range(len(lengths))]
        return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)

    def _fields_of(
        self, rows: list[int], fields: Mapping[str, Any], images: list[list | None] | None
    ) -> dict[str, Any]:
        """Return a processor's outputs for some rows, split like trl's micro-batches."""
        if images is None or not any(images[row] for row in rows):
            return {name: x[rows] for name, x in fields.items() if name not in MEDIA}
        counts: dict[str, Any] = {"num_images": [len(of_row or ()) for of_row in images]}
        tiles, pixels = sum(counts["num_images"]), fields["pixel_values"]
        # for InternVL, only the image processor returns the tile counts
        if pixels.dim() == 4 and len(pixels) != tiles:
            found = self.processing_class.image_processor(images=images, crop_to_patches=True, return_tensors="pt")
            counts["num_tiles"] = [int(x.sum()) for x in found["num_patches"].split(counts["num_images"])]
        split, join = compat.cuts_of_rows()
        cut = fields if "spatial_shapes" in fields else split({**fields, **counts})
        cut = {name: x for name, x in cut.items() if name not in counts}
        if wrong := sorted(name for name, x in cut.items() if len(x) != len(images)):
            raise InputError(
                f"trl's GRPO and RLOO need images that are cut by rows; got {len(cut[wrong[0]])} of {wrong[0]} for "
                f"{len(images)} rows, leave images out, or train by DPO"
            )
        parts = {name: [x[row] for row in rows] if isinstance(x, list) else x[rows] for name, x in cut.items()}
        return join(parts)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """Score this group's completions.

        Reward functions run only on the group's first rank, and reward models run on all ranks of the group.
        """
        group, told = self.sp.groups.control, b""
        args = inputs, prompts, completions, completion_ids_list
        logs = compat.extra_logs(self), compat.extra_metrics(self)
        models = [isinstance(function, nn.Module) for function in self.reward_funcs]
        with together(self.sp.control_world, "computing rewards", "rewards", peers=group):
            if self.sp.size == 1 or dist.get_rank(group) == 0:
                nothing = functools.partial(_given, [0.0] * len(prompts))
                known = self._scored_by([nothing if models[i] else x for i, x in enumerate(self.reward_funcs)], *args)
                told = pickle.dumps((known.cpu(), *map(dict, logs)))
        _, told = all_gather_objects(group, ("rewards", told))[0]
        known, *logged = pickle.loads(told)
        for log, of_first in zip(logs, logged, strict=True):
            log.update(of_first)
        rng_state.share(group)  # reward functions may draw random numbers
        if any(models):
            columns = known.T.tolist()
            given = [x if models[i] else functools.partial(_given, columns[i]) for i, x in enumerate(self.reward_funcs)]
            known = self._scored_by(given, *args)
        return self.accelerator.gather(known.to(self.accelerator.device))

    def _scored_by(self, functions: list[Any], *args: Any) -> Tensor:
        """Return the rewards (rows, functions) that the given functions assign to this group's completions."""
        before, self.reward_funcs = self.reward_funcs, functions
        try:
            names = {"gather": lambda rewards: rewards}
            return rebound(super()._calculate_rewards.__func__, names, "rewards of groups")(self, *args)
        finally:
            self.reward_funcs = before

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        function = super()._generate_and_score_completions.__func__
        names = {"gather": self.accelerator.gather, "gather_object": self.accelerator.gather_objects}
        names = {name: names[name] for name in globals_read(function) & {*names}}  # GRPO gathers only objects
        return rebound(function, names, "completions of groups")(self, inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        if self.model.training and rolls_out(self):
            ids, mask = (
                torch.cat([prepared[f"{part}_{name}"] for part in ("prompt", "completion")], dim=1)
                for name in ("ids", "mask")
            )
            self._throughput.count({"input_ids": ids, "attention_mask": mask})
        return prepared


def _given(rewards: list[float], **_: Any) -> list[float]:
    return rewards
