"""What DeepSpeed itself refuses in its JSON, found before anything is launched. DeepSpeed's own configuration class
decides; what it says becomes one sentence, with the key and its value."""

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
    """source: the file that the content is from, where it is from one. "auto" is left to who fills it in. Raises
    ConfigError for what DeepSpeed refuses, and for texts in place of numbers and of true or false: "false" is false for
    DeepSpeed and true for transformers."""
    section_of(content)  # one that is misspelt, or stands inside another, is no key that DeepSpeed does not know
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
    """What DeepSpeed makes of a configuration. Batch sizes go with a number of ranks; they were checked above."""
    from deepspeed.runtime.config import DeepSpeedConfig  # takes seconds: only who has a configuration waits for it

    return DeepSpeedConfig({**_theirs(content), "train_micro_batch_size_per_gpu": 1})


def _theirs(content: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Without "auto" and without what DeepSpeed is not given, or what is refused with sequence parallelism anyway."""
    return {
        key: _theirs(value, f"{place}{key}.") if isinstance(value, Mapping) else value
        for key, value in content.items()
        if value != "auto" and f"{place}{key}" not in OURS
    }
