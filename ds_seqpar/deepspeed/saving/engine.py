"""Save a DeepSpeed engine's checkpoints atomically, and load them in the same run or in a run with other settings."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from ...base import compat
from ...base.errors import ConfigError, as_seqpar_error
from ...base.log import log_once
from ...data.loader import Loader
from ...data.random_states import random_state, set_random_state
from ...data.sharding import Sharding
from ...guards.agreement import assert_ranks_agree
from ...guards.process_exit import is_lost
from ..config import DeepSpeedJson
from ..hooks import CHECKPOINTS, WRITING, hooks_of
from .atomic import AtomicCheckpoint, atomic_checkpoint, recover
from .resuming import UNIVERSAL, EngineReport, LoadingRun, convert, inspect_engine, report_of_all, restore_missing_state

PROGRESS = 5.0  # seconds between checks for whether a conversion has finished

# arguments of DeepSpeed's load_checkpoint, by position
OPTIONS = ("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only",
           "custom_load_fn")  # fmt: skip


class EngineCheckpoints:
    """Methods that wrap an engine's own methods for saving and loading checkpoints.

    Args:
        engine: DeepSpeed's engine. Wrapping the same engine again has no effect.
        sp: The SequenceParallel with which the engine trains.
        of_loop: Whether to also save the state of the training loop, as for `initialize`.

    Raises:
        ConfigError: The configuration requests a checkpoint writer that keeps writing after its call has returned.
    """

    def __init__(self, engine: Any, sp: Sharding, of_loop: bool) -> None:
        if engine.checkpoint_engine is not None and engine.checkpoint_engine.is_decoupled():  # None without training
            raise ConfigError(
                'checkpoints need a writer that returns once files are written; got "decoupled" in "checkpoint" of '
                "the JSON, leave it out"
            )
        self.engine, self.sp, self.of_loop, self.ranks = engine, sp, of_loop, sp.size * sp.data_size
        hooks = hooks_of(engine)
        hooks.install(CHECKPOINTS, save_checkpoint=self.save_checkpoint, load_checkpoint=self.load_checkpoint)

    def save_checkpoint(
        self,
        save: Callable[..., Any],
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        loader: Loader | None = None,
    ) -> bool:
        """Save a checkpoint that becomes visible when all ranks have written their files.

        The call is collective across all ranks.

        Args:
            save: DeepSpeed's method.
            save_dir: The folder that contains checkpoints.
            tag: The checkpoint's name. The default is `global_step` followed by the number of optimizer steps.
            client_state: A dict that `load_checkpoint` returns.
            save_latest: Whether `load_checkpoint` loads this checkpoint by default from then on.
            exclude_frozen_parameters: Whether to exclude frozen parameters.
            loader: A loader from `sp.loader`, to save the loader's position. The default is the loader of
                `training_data`.

        Returns:
            True.

        Raises:
            ConfigError: A rank cannot write, or gradients are being accumulated. Earlier checkpoints are unchanged.
                Raised on every rank.
        """
        engine, folder, group = self.engine, Path(save_dir), self.sp.control_world
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        compared = {"tag": name, "steps": engine.global_steps, "save_latest": save_latest}
        compared["loader"] = self._loader(loader) is not None
        done, steps = engine.micro_steps % engine.gradient_accumulation_steps(), engine.gradient_accumulation_steps()
        error = _unread(folder / name) or _misnamed(name) or _unknown(loader)
        if self.of_loop and done and not engine.was_step_applied():
            error = ConfigError(
                f"a checkpoint has no gradients, so it is saved after an optimizer step; got save_checkpoint after "
                f"{done} of the {steps} micro-batches of one, call it after the last"
            )
        assert_ranks_agree(group, "checkpoint", compared, error=error, call="save_checkpoint")
        with atomic_checkpoint(group, folder, name, self._leads, save_latest) as checkpoint:
            writer, scripts = engine.checkpoint_engine, compat.COPY_SCRIPTS
            with _deferring(checkpoint, writer, "save"), _deferring(checkpoint, engine, scripts, str(folder)):
                try:
                    save(str(checkpoint.path.parent), name, client_state or {}, False, exclude_frozen_parameters)
                except Exception as reason:  # raised immediately, since other ranks are waiting in DeepSpeed's barriers
                    if is_lost(reason):
                        raise
                    raise as_seqpar_error("collecting what is saved failed", reason) from reason
                writer.save(self._loop_state(loader), _loop_file(checkpoint.path, engine.global_rank))
        return True

    def load_checkpoint(
        self,
        load: Callable[..., Any],
        load_dir: str | Path,
        tag: str | None = None,
        *options: Any,
        loader: Loader | None = None,
        **given: Any,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint, even from a run with a different number of ranks, SP size or ZeRO stage.

        If optimizer states are loaded too, the run resumes, with its random states and the loader's position restored.
        The call is collective across all ranks.

        Args:
            load: DeepSpeed's method.
            load_dir: The folder that contains checkpoints.
            tag: The checkpoint's name. The default is the latest checkpoint.
            *options: DeepSpeed's load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
                and custom_load_fn.
            loader: The loader from `sp.loader` that resumes. The default is the loader of `training_data`.
            **given: The same options passed by name.

        Returns:
            (the loaded path, the saved `client_state`), or (None, None) if the folder has no checkpoint yet.

        Raises:
            ConfigError: The checkpoint is incomplete, or the run cannot resume from the checkpoint. Raised on every
                rank.
        """
        engine, folder, group = self.engine, Path(load_dir), self.sp.control_world
        if self._leads:
            with contextlib.suppress(OSError):  # for a read-only folder
                recover(folder, remove=False)
        assert_ranks_agree(group, "folder of checkpoints", None, call="load_checkpoint")
        given |= zip(OPTIONS, options, strict=False)
        universal = engine.load_universal_checkpoint()
        name = _last(folder, universal) if tag is None else str(tag)
        error = _unknown(loader) or (None if name is None else _unread(folder / name))
        continues = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
        compared = {"tag": name, "optimizer states": continues, "loader": self._loader(loader) is not None}
        assert_ranks_agree(group, "checkpoint to load", compared, error=error, call="load_checkpoint")
        if name is None or universal or not continues:
            return load(str(load_dir), tag, **given)
        states, converts = self._inspected(folder / name, loader)
        if not converts:
            loaded = load(str(load_dir), name, **given)
        else:
            self._convert(folder / name)
            config = compat.engine_config(engine)
            config.load_universal_checkpoint = True
            try:
                loaded = load(str(folder / name), UNIVERSAL, **given)
            finally:
                config.load_universal_checkpoint = False
            restore_missing_state(engine, folder / name / UNIVERSAL)
        if states is not None:
            if (loader := self._loader(loader)) is not None:
                loader.load_state_dict(states["loader"])
            set_random_state(states["random"])
        return loaded

    @property
    def _leads(self) -> bool:
        """Whether this rank creates and renames folders, which is true for one rank per file system."""
        return (self.engine.local_rank if self.engine.use_node_local_storage() else self.engine.global_rank) == 0

    def _loader(self, given: Loader | None) -> Loader | None:
        own = self.engine.training_dataloader
        return own if given is None and isinstance(own, Loader) else given

    # ---- the state of a training loop, in addition to DeepSpeed's files

    def _loop_state(self, loader: Loader | None) -> dict[str, Any]:
        loader = self._loader(loader)
        state = {"ranks": self.ranks, "groups": self.sp.data_size, "sequences": self.engine.train_batch_size()}
        if self.of_loop:
            state |= {"random": random_state(), "loader": None if loader is None else loader.state_dict()}
        return state

    def _read_loop_state(self, folder: Path, loader: Loader | None) -> dict[str, Any] | None:
        """Return this rank's loop state, or None if the checkpoint contains no loop state.

        Raises:
            ConfigError: The training loop cannot resume from the saved state.
        """
        rank = self.engine.global_rank
        file = next((x for x in (_loop_file(folder, 0), _loop_file(folder, rank)) if x.exists()), None)
        if file is None:
            return None
        state = torch.load(file, weights_only=False)
        if state["sequences"] != self.engine.train_batch_size():
            raise ConfigError(
                "a run goes on with as many sequences a step (of a device, by accumulation, by groups); got "
                f"{self.engine.train_batch_size()} and a checkpoint of {state['sequences']}, set that"
            )
        if not self.of_loop or "random" not in state:
            return None
        if (state["loader"] is None) != (self._loader(loader) is None):
            has, lacks = ("the run", "checkpoint") if state["loader"] is None else ("the checkpoint", "run")
            raise ConfigError(
                f"a run goes on at the place of its loader; got one in {has} and none in the {lacks}, give the same "
                "loader= to save_checkpoint and load_checkpoint"
            )
        if (state["ranks"], state.get("groups", self.sp.data_size)) != (self.ranks, self.sp.data_size):
            # the same on all ranks that share a sequence
            rank = self.sp.data_rank * state["ranks"] // self.sp.data_size
        own = torch.load(_loop_file(folder, rank), weights_only=False)
        return state | {"random": own["random"]}

    # ---- checks before loading

    def _inspected(self, folder: Path, loader: Loader | None) -> tuple[dict[str, Any] | None, bool]:
        """Return (the loop state, whether the checkpoint must be converted).

        Raises:
            ConfigError: The checkpoint is incomplete, or this run cannot resume from the checkpoint. Raised on every
                rank.
        """
        engine, states = self.engine, None
        settings = DeepSpeedJson.read(engine.config).known
        run = LoadingRun(
            rank=engine.global_rank, ranks=self.ranks, stage=settings.zero_optimization.stage, dtype=settings.dtype
        )

        def inspected() -> EngineReport:
            nonlocal states
            report = inspect_engine(folder, run)
            try:
                states = None if report.fault or report.mismatch else self._read_loop_state(folder, loader)
            except ConfigError as reason:
                report.mismatch = str(reason)
            return report

        report = report_of_all(self.sp.control_world, inspected)
        if report.mismatch:
            raise ConfigError(f"{report.mismatch} (of {folder})")
        if report.fault:
            raise ConfigError(
                f"load_checkpoint needs a whole checkpoint; got {folder}, where {report.fault}, name another tag"
            )
        return states, report.converts

    def _convert(self, source: Path) -> None:
        """Convert a checkpoint on the first rank, for this run and all later runs.

        The call is collective across all ranks.

        The result is written inside the checkpoint's folder, since another run may be saving next to this folder.
        """
        group = self.sp.control_world
        if assert_ranks_agree(group, "conversion", None, number=int(not (source / UNIVERSAL).exists())) == 0:
            return
        log_once(f"sequence_parallel: converting {source}, once, for another number of ranks or ZeRO stage")
        with atomic_checkpoint(group, source, UNIVERSAL, self.engine.global_rank == 0) as checkpoint:
            with ThreadPoolExecutor(1) as pool:
                jobs = [pool.submit(convert, source, checkpoint.path)] if self.engine.global_rank == 0 else []
                # wait in short intervals, below the group's timeout
                while assert_ranks_agree(group, "conversion", None, number=len(wait(jobs, PROGRESS).not_done)):
                    pass
            for job in jobs:
                job.result()


@contextlib.contextmanager
def _deferring(checkpoint: AtomicCheckpoint, owner: Any, name: str, *given: Any) -> Iterator[None]:
    """Context manager that stores a method's errors until all ranks have written. A non-empty `given` replaces the
    method's arguments.
    """

    def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with checkpoint.keeping_errors(args):
            method(*(given or args), **kwargs)

    hooks_of(owner).install(WRITING, **{name: call})
    try:
        yield
    finally:
        hooks_of(owner).remove(WRITING)


def _loop_file(folder: Path, rank: int) -> Path:
    return folder / f"sequence_parallel_rank_{rank}.pt"


def _unread(folder: Path) -> ConfigError | None:
    if glob.escape(str(folder)) == str(folder):
        return None
    return ConfigError(f"DeepSpeed finds a checkpoint where no name has one of *?[; got {folder}, rename that folder")


def _misnamed(tag: str) -> ConfigError | None:
    if tag and tag == Path(tag).name and not tag.startswith((".", "latest")):
        return None
    return ConfigError(
        f'a tag names a folder in save_dir, and neither "latest" nor a hidden one; got {tag!r}, give it another name'
    )


def _unknown(loader: object) -> ConfigError | None:
    if loader is None or isinstance(loader, Loader):
        return None
    return ConfigError(f"loader= takes a loader of sp.loader; got {type(loader).__name__}, make one of it")


def _last(folder: Path, universal: bool) -> str | None:
    """Return the name of the last saved checkpoint, or None."""
    file = folder / ("latest_universal" if universal else "latest")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None
