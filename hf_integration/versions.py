"""Which transformers the Trainer was tested with: it overrides hooks of theirs that are nobody's promise."""

from __future__ import annotations

import os
import warnings

from packaging.version import Version

from ds_seqpar.errors import ConfigError

# (major, minor), both of which `make test-all` runs; setup.cfg says the same
OLDEST, NEWEST = (5, 18), (5, 23)


def check_transformers(version: str) -> None:
    """Raises ConfigError for a transformers that is too old; warns, on one rank, of one that is newer than tested."""
    found = Version(version).release[:2]
    tested = f"transformers {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    if found < OLDEST:
        raise ConfigError(f"SequenceParallelTrainer needs {tested}; got {version}, install one of them")
    if found > NEWEST and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"SequenceParallelTrainer is tested with {tested}, got {version}: compare a short run with the plain "
            "Trainer's before you trust it",
            stacklevel=3,
        )
