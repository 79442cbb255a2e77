"""Whole-sequence tensors that are sharded across ranks, and the torch functions that operate on them."""

from . import rules as rules
from .tensor import WholeTensor, plain, whole_loss, whole_of

__all__ = ["WholeTensor", "plain", "whole_loss", "whole_of"]
