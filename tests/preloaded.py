"""Imported last by the server from which ranks are forked."""

import gc

import deepspeed.ops
import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# find which DeepSpeed ops can be built here: every process that does not know yet would call the compiler
deepspeed.ops.__compatible_ops__  # noqa: B018
get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns on a process's first save or load
torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1))  # the first compilation makes long tables
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
gc.freeze()  # a rank's collector, which ZeRO-3 calls for every engine, skips all that was imported
gc.enable()
