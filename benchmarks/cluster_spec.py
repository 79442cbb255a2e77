"""How a configuration of `benchmarks.cluster` is spelled, and what it is then.

ring   mesh=4,1,4   attention2d=4,4+overlap   u4/attention2d=2,2   u8/ring+layout=contiguous   u16
deepspeed   ringmaster   ringmaster=distflash   ringmaster=usp,4   ring-attention-pytorch
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

# schedule -> the settings that its shape is, in order
SHAPES = {
    "ring": (),
    "triangle": ("strips",),
    "distflash": (),
    "double_ring": ("window",),
    "wallfacer": ("team",),
    "attention2d": ("rows", "cols"),
    "mesh": ("mesh",),
}
PEERS = {  # name -> how many words its shape has at most
    "deepspeed": 0,
    "ringmaster": 2,
    "ring-attention-pytorch": 0,
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """name: as it was spelled. peer: whose it is, None where ours. settings: our "sequence_parallel" section without
    size; of a peer its own words."""

    name: str
    peer: str | None
    settings: tuple[tuple[str, Any], ...]

    @property
    def section(self) -> dict[str, Any]:
        return dict(self.settings)


def parse(text: str) -> Spec:
    """Raises ValueError for what is not spelled so, in a sentence."""
    head, *extra = text.split("+")
    base, _, shape = head.partition("=")
    if base in PEERS:
        words = tuple(shape.split(",")) if shape else ()
        if len(words) > PEERS[base] or extra:
            raise ValueError(f"{base} takes at most {PEERS[base]} words after =, and no settings; got {text!r}")
        return Spec(text, base, (("words", words),))
    match = re.fullmatch(r"(?:u(\d+)(?:/(?=.)|$))?(.*)", head)
    assert match
    schedule, _, shape = (match[2] or ("ring" if match[1] else "")).partition("=")
    settings: dict[str, Any] = {"ulysses": int(match[1] or 1), "schedule": schedule, **_shape(text, schedule, shape)}
    for word in extra:
        key, given, value = word.partition("=")
        settings[key] = _value(value) if given else True
    return Spec(text, None, tuple(settings.items()))


def _shape(text: str, schedule: str, shape: str) -> dict[str, Any]:
    names = SHAPES.get(schedule)
    if names is None:
        known = ", ".join((*SHAPES, *PEERS))
        raise ValueError(f"a configuration must be uN, SCHEDULE or uN/SCHEDULE; got {text!r}, use one of {known}")
    if not shape:
        return {}
    try:
        counts = [int(word) for word in shape.split(",")]
    except ValueError:
        counts = []
    if len(counts) not in ((3,) if schedule == "mesh" else range(1, len(names) + 1)):
        wanted = "a,b,R" if schedule == "mesh" else ",".join(names) or "nothing"
        raise ValueError(f"{schedule}'s shape is {wanted} in whole numbers; got {text!r}")
    return {"mesh": counts} if schedule == "mesh" else dict(zip(names, counts, strict=False))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
