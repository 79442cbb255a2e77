"""Models with Liger's kernels. Its norms, activations and RoPE compute each token by itself, so a rank's own tokens are
enough. Its fused loss takes shift_labels and num_items_in_batch, and its logits never stand whole: it takes the place
of our loss tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_of_liger(forward: Callable[..., Any]) -> bool:
    """Whether a forward is Liger's: of a class that Liger wrote, or put over that of a module."""
    return getattr(forward, "__module__", "").startswith("liger_kernel.")


def as_in_training(model: Any) -> dict[str, bool]:
    """The arguments by which a model in evaluation mode computes its loss as it does in training: fused with the head,
    without logits. Empty where it has one way alone."""
    return {"skip_logits": True} if is_of_liger(model.forward) else {}
