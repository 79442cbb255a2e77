"""Imported first by the server that ranks are forked from: no collector looks through what is being imported, and what
is installed is read once. (accelerate reads it several times for every Trainer, trl all of it when it is imported.)"""

import functools
import gc
import importlib.metadata

gc.disable()
for name in ("metadata", "packages_distributions", "version"):
    setattr(importlib.metadata, name, functools.cache(getattr(importlib.metadata, name)))
