"""Finds what DeepSpeed itself refuses in its JSON, before anything is launched. DeepSpeed's configuration class
decides; its message becomes one sentence, with the key and its value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..files import JsonField, call_library
from .deepspeed_json import BATCH_SIZES, KIND, REFUSED, SECTION, Zero, section_of

# keys that other functions check, as "zero_optimization.zenflow": DeepSpeed's class does not get them here
CHECKED_ELSEWHERE = {SECTION, *REFUSED, *BATCH_SIZES}
SECTIONS = ("zero_optimization", "bf16", "bfloat16", "fp16")  # which must be objects


def check_deepspeed(content: Mapping[str, Any], source: object = None) -> None:
    """Checks a DeepSpeed JSON. source: its file, if it has one. "auto" is not checked: a Trainer replaces it. Raises
    ConfigError for what DeepSpeed refuses, and for texts in place of numbers or of true and false: DeepSpeed reads
    "false" as false, transformers as true."""
    section_of(content)  # raises for a misspelt section, which DeepSpeed would call an unknown key
    place = f"{KIND} {source}" if isinstance(source, str | os.PathLike) else KIND
    # flag() and count() raise ConfigError for a value of another type
    for key in SECTIONS:
        section = JsonField(place, content.get(key, {}), key)
        if not isinstance(section.value, Mapping):
            raise section.wrong("an object")
        if section.value.get("enabled", "auto") != "auto":
            section.inner("enabled", section.value["enabled"]).flag()
    for key in BATCH_SIZES:
        if content.get(key, "auto") not in (None, "auto"):
            JsonField(place, content[key], key).count()
    try:
        Zero.of(content.get("zero_optimization", {}))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    call_library("DeepSpeed", place, content, _parsed)


def _parsed(content: dict[str, Any]) -> Any:
    """DeepSpeed's configuration object; its class raises for what it refuses. Batch sizes depend on the number of
    ranks: the given ones are left out, and 1 stands for them."""
    from deepspeed.runtime.config import DeepSpeedConfig  # takes seconds: imported only for a user's configuration

    return DeepSpeedConfig({**_for_deepspeed(content), "train_micro_batch_size_per_gpu": 1})


def _for_deepspeed(content: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """The configuration without "auto" and without what is checked elsewhere. outer: the key of the section that has
    this content, with a dot after it."""
    return {
        key: _for_deepspeed(value, f"{outer}{key}.") if isinstance(value, Mapping) else value
        for key, value in content.items()
        if value != "auto" and f"{outer}{key}" not in CHECKED_ELSEWHERE
    }
