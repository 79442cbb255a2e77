"""Imported last by the server from which ranks are forked."""

import gc

import deepspeed.ops
import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# which of DeepSpeed's ops can be built here: it calls the compiler to know, in every process that does not know it yet
deepspeed.ops.__compatible_ops__  # noqa: B018
get_checkpoint_conversion_mapping("llama")  # it compiles a thousand patterns in every process that saves or loads first
torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1))  # whoever compiles first makes long tables
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
gc.freeze()  # a rank's collector, which ZeRO-3 calls for every engine, does not look through all that was imported
gc.enable()
