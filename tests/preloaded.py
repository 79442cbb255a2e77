"""Imported last by the server that ranks are forked from."""

import gc

gc.freeze()  # a rank's collector, which ZeRO-3 calls for every engine, does not look through all that was imported
gc.enable()
