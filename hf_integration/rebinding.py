"""Functions of other packages with other globals, so that no module of theirs is changed."""

from __future__ import annotations

import functools
import types
from typing import Any


def rebound(function: Any, names: dict[str, Any]) -> Any:
    """Return a copy of a function that has these globals; of a decorated one, the function inside has them."""
    inside, scope, closure = getattr(function, "__wrapped__", None), function.__globals__, function.__closure__
    if inside is None:
        scope = {**scope, **names}
    else:
        rebound_inside = types.CellType(rebound(inside, names))
        closure = tuple(rebound_inside if cell.cell_contents is inside else cell for cell in closure or ())
    code = function.__code__.replace()  # torch.compile keeps, by code, what it puts into globals
    copied = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copied, function)
