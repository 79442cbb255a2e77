"""A planted fault: on ranks, one line of a function is changed. The process that starts ranks keeps the right line, so
its reference results stay right.

    PLANTED='["ds_seqpar.data.part:Part.shifted", "x.roll(-1, dim)", "x.roll(1, dim)"]'   what new ranks do first
"""

import __future__

import importlib
import inspect
import textwrap

PLANTED = "PLANTED"  # environment variable: the arguments of `plant` as JSON


def plant(where, right, wrong):
    """Replaces `right`, which occurs once in a function's code, by `wrong`. where: module:name.name"""
    module, _, path = where.partition(":")
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    function = _function(inspect.getattr_static(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{where} has {source.count(right)} times {right!r}"
    source, names = source.replace(right, wrong), {}
    if free := function.__code__.co_freevars:  # `super()` in a method has one, its class
        source = f"def made({', '.join(free)}):\n{textwrap.indent(source, '    ')}\n    return {name}"
    code = compile(source, inspect.getfile(function), "exec", __future__.annotations.compiler_flag)
    exec(code, vars(importlib.import_module(module)), names)
    function.__code__ = _function(names["made"](*free) if free else names[name]).__code__


def _function(x):
    """The function inside a method, a property or a wrapper."""
    for name in ("func", "fget", "__func__"):
        x = getattr(x, name, x)
    return inspect.unwrap(x)
