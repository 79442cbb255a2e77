"""Correct DeepSpeed's statistics, in which each sequence counts once per rank that shares it."""

from __future__ import annotations

from typing import Any

from ..base import compat
from .config import DeepSpeedJson
from .hooks import COUNTS, hooks_of


def count_by_rank(content: dict[str, Any], sp: Any) -> None:
    """Multiply `train_batch_size` by the SP size if accelerate's DeepSpeed configuration sets all three batch sizes.

    A value that is already multiplied stays unchanged. Raise ConfigError for any other inconsistent value.
    """
    json = DeepSpeedJson.read(content)
    batch, micro, steps = json.batch_sizes
    if batch and micro and steps and batch != micro * steps * sp.data_size * sp.size:
        content["train_batch_size"] = json.batch_by_rank(sp.size, sp.data_size)


def count_sequences(engine: Any, sp: Any) -> None:
    """Make an engine count sequences instead of ranks. A second call has no effect.

    The correction applies to `train_batch_size()` and its setters, samples per second, and `global_samples`, the x axis
    in monitors. Gradient scaling does not use the corrected numbers.
    """

    def count() -> None:
        compat.engine_config(engine).train_batch_size //= sp.size
        if sp.accumulation_steps is not None:
            sp.accumulation_steps = engine.gradient_accumulation_steps()

    def set_batch(method: Any, train_batch_size: int) -> None:
        sizes = {"train_batch_size": train_batch_size}
        sizes["train_micro_batch_size_per_gpu"] = engine.train_micro_batch_size_per_gpu()
        method(DeepSpeedJson.read(sizes).batch_by_rank(sp.size, sp.data_size))
        count()

    def set_micro_batch(method: Any, micro_batch_size: int) -> None:
        method(micro_batch_size)
        count()

    setters = {"set_train_batch_size": set_batch, "set_train_micro_batch_size": set_micro_batch}
    if not hooks_of(engine).install(COUNTS, **setters):
        return
    count()
    compat.engine_timer(engine).batch_size //= sp.size
    if engine.flops_profiler_enabled():
        engine.flops_profiler.ds_engine = _PartsOfSequences(compat.profiled_engine(engine.flops_profiler), sp.size)


class _PartsOfSequences:
    """A wrapper around an engine for DeepSpeed's flops profiler.

    A device processes `1 / size` of each sequence in its micro-batch.
    """

    def __init__(self, engine: Any, size: int) -> None:
        self.engine, self.size = engine, size

    def train_micro_batch_size_per_gpu(self) -> float:
        return self.engine.train_micro_batch_size_per_gpu() / self.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)
