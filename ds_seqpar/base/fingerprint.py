"""Represent values in comparable form, and compute hashes that are the same in every process."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

Fields = dict[str, str]


class Fingerprint(int):
    """A 63-bit hash, which fits into an int64 even when negated. The hash is formatted as 16 hexadecimal digits."""

    @classmethod
    def of_bytes(cls, content: bytes | memoryview) -> Fingerprint:
        return cls(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1)

    @classmethod
    def of(cls, *content: object) -> Fingerprint:
        """Return the fingerprint of the repr of the contents, which must not contain memory addresses."""
        return cls.of_bytes(repr(content).encode())

    def __str__(self) -> str:
        return f"{int(self):016x}"

    __format__ = object.__format__  # formatted as text in f-strings too


class Compared:
    """A value in the form that ranks compare, with fields and a fingerprint of the fields."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self.fields = name, fields_of(value)
        self.fingerprint = Fingerprint.of(name, sorted(self.fields.items()))


def fields_of(value: object, name: str = "") -> Fields:
    """Return the name and repr of each field that is compared separately. A tuple, such as a shape, counts as one
    field.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list):
        value = {f"[{number}]": item for number, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {name: repr(value)}
    inner = [fields_of(item, f"{name} {key}".strip()) for key, item in value.items()]
    return {field: text for fields in inner for field, text in fields.items()}
