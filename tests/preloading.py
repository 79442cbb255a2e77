"""Imported first by the server from which ranks are forked: the garbage collector does not scan what is being imported,
and the list of installed packages is read only once. (accelerate reads it several times for every Trainer, trl all of
it when it is imported.)"""

import functools
import gc
import importlib.metadata

gc.disable()
for name in ("metadata", "packages_distributions", "version"):
    setattr(importlib.metadata, name, functools.cache(getattr(importlib.metadata, name)))
