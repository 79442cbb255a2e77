"""Read and validate user files.

Files are rejected if they are too large, too deeply nested, or invalid JSON. Values are rejected if they are out of
range or have the wrong type. The error message is one sentence that names the file, the key and the value.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import pydantic

from .errors import ConfigError, SeqParError, did_you_mean

LARGEST_FILE = 2**22  # bytes; the largest model configurations take about 100 KB
DEEPEST = 32  # maximum nesting of objects and lists
LARGEST = 2**63 - 1  # maximum integer
SHOWN = 60  # maximum number of characters of a value to show in a message
LONGEST = 200  # maximum number of characters of a library's message to quote
T = TypeVar("T")
# pydantic configuration of the dataclasses for user files and sections
STRICT = pydantic.ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, validate_by_name=True, validate_by_alias=True
)


def write_text(path: str | os.PathLike[str], text: str, subject: str) -> None:
    """Write a text file.

    Args:
        subject: The purpose of the file, such as "a trace".

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{subject} needs a file that can be written; got {path}: {error}") from None


def read_text(path: str | os.PathLike[str], subject: str, form: str = "file", *, most: int = LARGEST_FILE) -> str:
    """Return the text of a file.

    Args:
        subject: The purpose of the file, such as "the DeepSpeed configuration".
        form: The required kind of file, for the message.
        most: Maximum size of the file in bytes.

    Raises:
        ConfigError: The file cannot be read, is larger than `most`, or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{subject} must be a readable {form}; {path}: {reason}") from None
    if len(data) > most:
        raise ConfigError(f"{subject} must have at most {most} bytes; {path} has more")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{subject} must be UTF-8 text; {path}: {error.reason}") from None


def read_json(path: str | os.PathLike[str], subject: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: See `read_text` and `parse_json`. Also raised if the file does not contain an object.
    """
    content = parse_json(read_text(path, subject, "JSON file"), subject, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{subject} must be a JSON object; {path} holds a {type(content).__name__}")
    return content


def parse_json(text: str, subject: str, place: str, or_text: bool = False) -> Any:
    """Return the value represented by a JSON text.

    Args:
        subject: The purpose of the text.
        place: The origin of the text.
        or_text: Whether to return text that is not JSON unchanged instead of raising an error.

    Raises:
        ConfigError: The text is not valid JSON, an object has a duplicate key, a number is not finite or exceeds 64
            bits, or more than `DEEPEST` objects and lists are nested.
    """
    too_deep = ConfigError(
        f"{subject} must have at most {DEEPEST} objects and lists inside one another; {place} has more"
    )
    try:
        content = json.loads(
            text,
            object_pairs_hook=_object_with_unique_keys,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_number,
        )
    except json.JSONDecodeError as error:
        if or_text:
            return text
        raise ConfigError(
            f"{subject} must be valid JSON; {place}, line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except _Refused as error:
        raise ConfigError(f"{subject} {error.needs}; {place} has {error.found}") from None
    except RecursionError:
        raise too_deep from None
    level = [content]
    for _ in range(DEEPEST + 1):  # after n iterations, the values nested n deep
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise too_deep
    return content


def call_library(library: str, place: str, content: Mapping[str, Any], make: Callable[[dict[str, Any]], T]) -> T:
    """Return `make(content)` for a function `make` that calls a library.

    Raises:
        ConfigError: The library rejects the content. The message includes the offending key, its value, and the
            library's message.
    """
    with quiet():
        try:
            return make(copy.deepcopy(dict(content)))
        except ConfigError:
            raise
        except Exception as error:  # any class, since a wrong type can cause any error in a library
            refused = refused_setting(content, functools.partial(_accepts, make))
            reason = f"{type(error).__name__}: {_first_sentence(error)}"
    settings = f'"{refused[0]}": {shown(refused[1])}' if refused else "several of its settings"
    raise ConfigError(f"{place} must be one that {library} takes; it refuses {settings} ({reason})")


def refused_setting(content: Mapping[str, Any], accepts: Callable[[dict[str, Any]], bool]) -> tuple[str, Any] | None:
    """Return (key, value) for the first setting that must be removed for the content to be accepted.

    Nested keys are joined with dots. Return None if no single setting is the cause.
    """
    for key, value in content.items():
        if accepts({name: other for name, other in content.items() if name != key}):

            def accepts_inside(inner: dict[str, Any], key: str = key) -> bool:
                return accepts({**content, key: inner})

            inside = refused_setting(value, accepts_inside) if isinstance(value, dict) else None
            return (f"{key}.{inside[0]}", inside[1]) if inside else (key, value)
    return None


def _accepts(make: Callable[[dict[str, Any]], Any], content: dict[str, Any]) -> bool:
    try:
        make(copy.deepcopy(content))
    except Exception:
        return False
    return True


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error message, without the title and URL that pydantic adds."""
    details = getattr(error, "errors", None)
    text = " ".join((details()[0]["msg"] if callable(details) else str(error)).split())
    return re.split(r"[.!?]\s+(?=[A-Z])", text)[0][:LONGEST]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress library warnings within the context.

    Some libraries print warnings to stdout, which would corrupt a command's output.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def shown(value: Any) -> str:
    """Return a value as JSON, truncated to fit into a sentence."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # for a dict built in code
        text = f"a {type(value).__name__}"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def read_as(form: type[T], content: object, place: str) -> T:
    """Return a pydantic dataclass with the values from parsed JSON.

    Args:
        form: The dataclass.
        content: The parsed JSON.
        place: The beginning of error messages, such as "machine ours: ".

    Raises:
        ConfigError: A value is invalid, or a key is missing or unknown. The message describes the first problem.
    """
    checker = pydantic.TypeAdapter(form)
    try:
        return checker.validate_json(json.dumps(content, default=repr))
    except pydantic.ValidationError as error:
        schema = checker.json_schema()
        known = [key for part in (schema, *schema.get("$defs", {}).values()) for key in part.get("properties", ())]
        raise as_config_error(error, content, place, known=known) from None


def as_config_error(
    error: pydantic.ValidationError,
    content: object,
    place: str,
    show: Callable[[object], str] = shown,
    known: Sequence[str] = (),
) -> SeqParError:
    """Describe the first problem found by pydantic in one sentence with the key, the requirement and the value.

    Args:
        error: The validation error.
        content: The validated content.
        place: The beginning of the sentence, such as "machine ours: ".
        show: A function that formats a value.
        known: Valid keys, to suggest a correction for a misspelled key.
    """
    faults = error.errors(include_url=False)
    within = {fault["loc"][:-1] for fault in faults}  # a key with faults inside its value is not unknown
    unknown = [f for f in faults if f["type"] == "unexpected_keyword_argument" and f["loc"] not in within]
    fault = (unknown or faults)[0]
    for reason in (fault.get("ctx", {}).get("error") for fault in faults):
        if isinstance(reason, SeqParError):  # raised by our own validators
            return reason
    key, value = _at(fault["loc"], content)
    if fault["type"] == "missing":
        return ConfigError(f"{place}{'.'.join(map(str, fault['loc']))} is needed; got none, add it")
    if unknown:
        name = str(fault["loc"][-1])
        return ConfigError(f"{place}{_cut(key)} does not exist; got {shown(name)}{did_you_mean(name, known)}")
    # "Input should be X", once for every branch of a union
    branches = [fault["msg"].partition(" should ")[2] for fault in faults if _at(fault["loc"], content)[0] == key]
    needed = " or ".join(dict.fromkeys(branches)).replace(" or be ", " or ").replace("'", '"')
    guess = did_you_mean(value, re.findall(r'"(\w+)"', needed)) if isinstance(value, str) else ""
    return ConfigError(f"{place}{key or 'the file'} must {needed}; got {show(value)}{guess}")


def _at(path: Sequence[str | int], content: object) -> tuple[str, object]:
    """Follow a path into the content and return (dotted key, value). The last steps of a pydantic path may name union
    branches instead of keys.
    """
    steps = []
    for step in path:
        inner = dict(enumerate(content)) if isinstance(content, list) else content
        if not isinstance(inner, Mapping) or step not in inner:
            break
        content = inner[step]
        steps.append(str(step))
    return ".".join(steps), content


class _Refused(Exception):
    """Raised for JSON content that is not allowed in user files."""

    def __init__(self, needs: str, found: str) -> None:
        super().__init__(needs)
        self.needs, self.found = needs, found


def _refuse_number(text: str) -> NoReturn:
    raise _Refused("must have finite numbers of at most 64 bits", _cut(text))


def _parse_int(text: str) -> int:
    return int(text) if len(text) <= 20 and abs(int(text)) <= LARGEST else _refuse_number(text)


def _parse_float(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse_number(text)


def _object_with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _Refused("must have each key once", f"{shown(twice)} twice in one object, remove one")
    return content


def _inside(value: object) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
