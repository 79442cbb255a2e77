"""Imported first by the server that ranks are forked from: no collector looks through what is being imported."""

import gc

gc.disable()
