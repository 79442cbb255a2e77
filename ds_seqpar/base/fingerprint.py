"""A hash that is the same in every process, by which ranks compare what they hold."""

from __future__ import annotations

import hashlib


class Fingerprint(int):
    """A hash of 63 bits: an int64 that can be negated. As text it has 16 hexadecimal digits."""

    @classmethod
    def of_bytes(cls, content: bytes | memoryview) -> Fingerprint:
        return cls(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1)

    @classmethod
    def of(cls, *content: object) -> Fingerprint:
        """Return the fingerprint of the contents' repr, which must hold no address."""
        return cls.of_bytes(repr(content).encode())

    def __str__(self) -> str:
        return f"{int(self):016x}"

    __format__ = object.__format__  # as text in f-strings too
