"""Load add-ons, which are optional folders in `ds_seqpar` with modules that register themselves."""

from __future__ import annotations

import importlib
import importlib.util


def load(folder: str) -> None:
    """Import an add-on folder of `ds_seqpar`, if it exists, so that the add-on's modules register themselves."""
    if importlib.util.find_spec(package := f"ds_seqpar.{folder}") is not None:
        importlib.import_module(package)
