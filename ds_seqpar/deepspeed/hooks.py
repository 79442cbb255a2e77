"""Run parts of ds_seqpar around a DeepSpeed engine's methods in a fixed order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

UNUSED, COUNTS, CHECKPOINTS, WRITING = "unused sharding", "counts", "checkpoints", "writing"
FINITE, KEPT = "finite numbers", "kept gradients"
# outermost first; a missing patch is reported before values are checked, which happens directly around DeepSpeed's
# method
ORDER = (UNUSED, COUNTS, CHECKPOINTS, WRITING, FINITE, KEPT)


class Hooks:
    """Parts of ds_seqpar that run around an object's methods."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.parts: dict[str, dict[str, Callable[..., Any]]] = {}  # callbacks by part and method, innermost first
        self.wrapped: set[str] = set()

    def install(self, part: str, **callbacks: Callable[..., Any]) -> bool:
        """Run a part around methods, inside the parts that come earlier in `ORDER`.

        Args:
            part: The name of the part in `ORDER`.
            **callbacks: A callback for each method name. A callback receives the wrapped function and the method's
                arguments.

        Returns:
            Whether the part is new. Installing a part again has no effect.
        """
        if part in self.parts:
            return False
        self.parts[part] = callbacks
        self.parts = {x: self.parts[x] for x in sorted(self.parts, key=ORDER.index, reverse=True)}
        for name in callbacks.keys() - self.wrapped:
            self._wrap(name)
        return True

    def remove(self, part: str) -> None:
        del self.parts[part]

    def _wrap(self, name: str) -> None:
        method = getattr(self.owner, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            inner = method
            for callbacks in self.parts.values():
                if name in callbacks:
                    inner = functools.partial(callbacks[name], inner)
            return inner(*args, **kwargs)

        vars(self.owner)[name] = call
        self.wrapped.add(name)


def hooks_of(owner: Any) -> Hooks:
    """Return the hooks of an engine, or of an object that the engine calls. The hooks are created on first use."""
    return vars(owner).setdefault("sequence_parallel_hooks", Hooks(owner))
