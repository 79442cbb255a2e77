"""Imported last by the server that ranks are forked from."""

import gc

import deepspeed.ops

# which of DeepSpeed's ops can be built here: it calls the compiler to know, in every process that does not know it yet
deepspeed.ops.__compatible_ops__  # noqa: B018
gc.freeze()  # a rank's collector, which ZeRO-3 calls for every engine, does not look through all that was imported
gc.enable()
