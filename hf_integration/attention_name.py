"""Gives the attention modules of a patched model our attention, and nobody else.

transformers looks an attention function up by the name in the config of the module that calls it. So each attention
module of a patched model is given a view of the model's config that says our name. The config itself stays as it was:
what is saved, copied or made of it knows nothing of us.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "ds_seqpar"
EAGER = "eager_attention_forward"


class ConfigView:
    """What an attention module reads in place of the model's config: the same, with the name of our attention."""

    _attn_implementation = NAME

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        if name == "own" or name.startswith("__"):  # what copies and pickles ask for before `own` is there
            raise AttributeError(name)
        return getattr(self.own, name)


def use_ours(module: Any) -> None:
    """Has an attention module call our attention."""
    module.config = ConfigView(module.config)


def use_own(module: Any) -> None:
    """Gives an attention module its config back."""
    module.config = module.config.own


def local_attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The attention of the unpatched model. "eager" is a function of each model's own file."""
    files = [sys.modules[kind.__module__] for kind in type(module).__mro__]
    eager: Any = next((file.eager_attention_forward for file in files if hasattr(file, EAGER)), None)
    function: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(module.config.own._attn_implementation, eager)
    with _own_config(module):
        return function(module, *args, **kwargs)


@contextlib.contextmanager
def _own_config(module: Any) -> Iterator[None]:
    """A context in which the module has its own config: flash attention reads the name of its kernel there."""
    view = module.config
    module.config = view.own
    try:
        yield
    finally:
        module.config = view
