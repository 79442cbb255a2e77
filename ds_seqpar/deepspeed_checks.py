"""Finds what DeepSpeed itself refuses in its JSON, before anything is launched. DeepSpeed's configuration class
decides; its message becomes one sentence, with the key and its value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .deepspeed_json import BATCH_SIZES, KIND, REFUSED, SECTION, Zero, section_of
from .errors import ConfigError
from .files import Given, call_library

OURS = {SECTION, *REFUSED, *BATCH_SIZES}
SECTIONS = ("zero_optimization", "bf16", "bfloat16", "fp16")  # which must be objects


def check_deepspeed(content: Mapping[str, Any], source: object = None) -> None:
    """Checks a DeepSpeed JSON. source: its file, if it has one. "auto" is not checked: a Trainer replaces it. Raises
    ConfigError for what DeepSpeed refuses, and for texts in place of numbers or of true and false: DeepSpeed reads
    "false" as false, transformers as true."""
    section_of(content)  # raises for a misspelt section, which DeepSpeed would call an unknown key
    place = f"{KIND} {source}" if isinstance(source, str | os.PathLike) else KIND
    for key in SECTIONS:
        section = Given(place, content.get(key, {}), key)
        if not isinstance(section.value, Mapping):
            raise section.wrong("an object")
        if section.value.get("enabled", "auto") != "auto":
            section.inner("enabled", section.value["enabled"]).flag()
    for key in BATCH_SIZES:
        if content.get(key, "auto") not in (None, "auto"):
            Given(place, content[key], key).count()
    try:
        Zero.of(content.get("zero_optimization", {}))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    call_library("DeepSpeed", place, content, _settled)


def _settled(content: dict[str, Any]) -> Any:
    """DeepSpeed's configuration object. Batch sizes depend on the number of ranks, and are left out."""
    from deepspeed.runtime.config import DeepSpeedConfig  # takes seconds: imported only for a user's configuration

    return DeepSpeedConfig({**_theirs(content), "train_micro_batch_size_per_gpu": 1})


def _theirs(content: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """The configuration without "auto", without our section, and without keys that have checks of their own."""
    return {
        key: _theirs(value, f"{place}{key}.") if isinstance(value, Mapping) else value
        for key, value in content.items()
        if value != "auto" and f"{place}{key}" not in OURS
    }
