"""Imported first by the server that ranks are forked from: no collector looks through what is being imported, and what
is installed is read once, which accelerate does several times for every Trainer and trl for all packages there are."""

import functools
import gc
import importlib.metadata

gc.disable()
for name in ("metadata", "packages_distributions", "version"):
    setattr(importlib.metadata, name, functools.cache(getattr(importlib.metadata, name)))
