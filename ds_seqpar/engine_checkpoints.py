"""Save a DeepSpeed engine's checkpoints whole, and load them into the same run or a changed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import compat
from .errors import ConfigError
from .parallel import SequenceParallel
from .runtime.agreement import assert_ranks_agree
from .saving import Aside, written_aside


class EngineCheckpoints:
    """The methods of an engine that save and load its checkpoints, with DeepSpeed's own inside.

    Args:
        engine: DeepSpeed's engine, whose methods these replace.
        sp: The SequenceParallel that it trains with.
        of_loop: Whether it is of a loop that nobody else saves, as of `initialize`.

    Raises:
        ConfigError: The configuration asks for a writer that goes on writing after it has returned.
    """

    def __init__(self, engine: Any, sp: SequenceParallel, of_loop: bool) -> None:
        if engine.checkpoint_engine.is_decoupled():
            raise ConfigError(
                'checkpoints need a writer that returns once files are written; got "decoupled" in "checkpoint" of '
                "the JSON, leave it out"
            )
        self.engine, self.sp, self.of_loop = engine, sp, of_loop
        self._save, engine.save_checkpoint = engine.save_checkpoint, self.save_checkpoint

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint, which is there once all ranks have written theirs. Collective over all ranks.

        Args:
            save_dir: The folder of checkpoints.
            tag: The checkpoint's name. The default is `global_step` with the number of optimizer steps.
            client_state: What `load_checkpoint` returns.
            save_latest: Whether it becomes the one that `load_checkpoint` takes by default.
            exclude_frozen_parameters: Whether to leave out parameters that are not trained.

        Returns:
            True.

        Raises:
            ConfigError: On every rank, where one cannot write, or gradients are being accumulated. Earlier checkpoints
                stay as they are.
        """
        engine, folder, group = self.engine, Path(save_dir), self.sp.control_world
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        compared = {"tag": name, "steps": engine.global_steps, "save_latest": save_latest}
        assert_ranks_agree(group, "checkpoint", compared, error=self._unsaved(), call="save_checkpoint")
        leads = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
        with written_aside(group, folder, name, leads, save_latest) as aside:
            writer, members = engine.checkpoint_engine, vars(engine)
            copy_scripts = getattr(engine, compat.COPY_SCRIPTS)
            engine.checkpoint_engine = _Writer(writer, aside)
            members[compat.COPY_SCRIPTS] = lambda _: _guarded(aside, copy_scripts, str(folder))
            try:
                self._save(str(aside.path.parent), name, client_state or {}, False, exclude_frozen_parameters)
            finally:
                engine.checkpoint_engine = writer
                del members[compat.COPY_SCRIPTS]
        return True

    def _unsaved(self) -> ConfigError | None:
        done, steps = self.engine.micro_steps, self.engine.gradient_accumulation_steps()
        if not self.of_loop or done % steps == 0 or self.engine.was_step_applied():
            return None
        return ConfigError(
            f"a checkpoint has no gradients, so it is saved after an optimizer step; got save_checkpoint after "
            f"{done % steps} of the {steps} micro-batches of one, call it after the last"
        )


class _Writer:
    """DeepSpeed's writer of files, whose errors are kept until all ranks have written."""

    def __init__(self, writer: Any, aside: Aside) -> None:
        self.writer, self.aside = writer, aside

    def save(self, *args: Any, **kwargs: Any) -> Any:
        return _guarded(self.aside, self.writer.save, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)


def _guarded(aside: Aside, write: Any, *args: Any, **kwargs: Any) -> Any:
    with aside.keeping_errors():
        return write(*args, **kwargs)
