"""Copy other packages' functions with different globals, so that the packages' modules stay unchanged."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from typing import Any

from ds_seqpar.base.compat import missing


def rebound(function: Any, names: dict[str, Any], breaks: str) -> Any:
    """Return a copy of a function with some globals replaced. In a decorated function, the globals of the inner
    function are replaced.

    Args:
        function: A function of another package.
        names: The replacement globals by name.
        breaks: The feature that needs the replacement, as named in the error message.

    Raises:
        ConfigError: The function does not read one of the names (perhaps in another release of the package), or a
            decorator does not call the function through a closure. In both cases, replacing the globals would have no
            effect.
    """
    inside, scope, closure = getattr(function, "__wrapped__", None), function.__globals__, function.__closure__
    place = f"{function.__module__}:{function.__qualname__}"
    if inside is None:
        if unread := sorted({*names} - globals_read(function)):
            raise missing(f"{place} with a call of {' and of '.join(unread)}", breaks)
        scope = {**scope, **names}
    else:
        rebound_inside = types.CellType(rebound(inside, names, breaks))
        closure = tuple(rebound_inside if cell.cell_contents is inside else cell for cell in closure or ())
        if rebound_inside not in closure:
            raise missing(f"{place} in the closure of its decorator", breaks)
    # a new code object, since torch.compile caches entries of globals per code object
    code = function.__code__.replace()
    copied = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copied, function)


def globals_read(function: Any) -> frozenset[str]:
    """Return the names that a function and its inner functions read as globals.

    The result is empty for objects that are not functions, and does not include attributes such as
    `accelerator.gather`.
    """
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return frozenset() if code is None else _globals_of(code)


@functools.cache
def _globals_of(code: types.CodeType) -> frozenset[str]:
    own = {x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own.union(*(_globals_of(x) for x in code.co_consts if isinstance(x, types.CodeType))))
