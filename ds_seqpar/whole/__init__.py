"""Tensors of whole sequences in shards, and what is done on the shards."""

from . import rules as rules
from .tensor import WholeTensor, plain, whole_loss, whole_of

__all__ = ["WholeTensor", "plain", "whole_loss", "whole_of"]
