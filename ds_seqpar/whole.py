"""Tensors of whole sequences in parts, and what is done on the parts."""

from . import whole_rules as whole_rules
from .whole_tensors import WholeTensor, plain, whole_loss, whole_of

__all__ = ["WholeTensor", "plain", "whole_loss", "whole_of"]
