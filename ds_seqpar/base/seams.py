"""Where add-ons come in: folders of `ds_seqpar` that the core does not name, whose modules register themselves."""

from __future__ import annotations

import importlib
import importlib.util


def load(folder: str) -> None:
    """Import an add-on folder of `ds_seqpar`, which registers what it has; there may be none."""
    if importlib.util.find_spec(package := f"ds_seqpar.{folder}") is not None:
        importlib.import_module(package)
