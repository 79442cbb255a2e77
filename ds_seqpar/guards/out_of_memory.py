"""Explain an out-of-memory error in one sentence that states where it occurred, how much memory was requested, and how
to save memory.

No state is recorded during training, because the failing module is read from the error's traceback.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from torch import nn

from ..base.hosts import host_memory

GIB = 2**30
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
WANTED = re.compile(rf"allocate ([\d.]+) ({'|'.join(UNITS)})")
DEVICE = re.compile(r"total capacity of ([\d.]+ \wiB) of which ([\d.]+ \wiB) is free")
# function that returns a clause about the job's memory; replaced when a model is prepared for training
advise: Callable[[], str] = str
ADVICE = "gradient checkpointing, mlp_tiles, loss_tiles, head_chunks and a larger size save memory"


def explain(error: BaseException, rank: int) -> BaseException:
    """Replace the message of an out-of-memory error with a one-sentence explanation, and return the error."""
    text, place = str(error), place_of(error.__traceback__)
    try:
        advice = advise()
    except Exception:  # an estimate must not hide the error
        advice = ""
    where = f" in {place}" if place else ""
    error.args = (f"rank {rank} ran out of memory{where}: {_amounts(text)}; {advice or ADVICE}",)
    error.__notes__ = []  # drop notes about program steps, which would be printed after the sentence
    return error


def _amounts(text: str) -> str:
    wanted, device = WANTED.search(text), DEVICE.search(text)
    asked = f"it asked for {float(wanted[1]) * UNITS[wanted[2]] / GIB:.3g} GiB" if wanted else text.splitlines()[0]
    if device:
        return f"{asked} where {device[2]} of {device[1]} were free"
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    most = min(host_memory(), limit if limit >= 0 else host_memory())
    held = pages * resource.getpagesize()
    return f"{asked} beside the {held / GIB:.3g} GiB that it held, where a process can have {most / GIB:.3g} GiB"


def place_of(trace: TracebackType | None) -> str:
    """Return the running phase and module, such as "forward of layer 3 (LlamaMLP)", or "" outside training."""
    phase, modules = "", list[nn.Module]()
    while trace is not None:
        name, owner = trace.tb_frame.f_code.co_name, trace.tb_frame.f_locals.get("self")
        if name == "backward":
            phase = "backward"
        elif name == "step" and owner is not None and not phase:
            phase = "the optimizer step"
        elif name == "forward" and isinstance(owner, nn.Module):
            phase = phase or "forward"
            modules.append(owner)
        trace = trace.tb_next
    numbers = [{str(x.layer_idx) for x in module.modules() if hasattr(x, "layer_idx")} for module in modules]
    layer = next((f" of layer {min(found)}" for found in numbers if len(found) == 1), "")  # skip whole models
    return phase + layer + (f" ({type(modules[-1]).__name__})" if modules else "")
