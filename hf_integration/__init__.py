"""ds_seqpar in HuggingFace transformers: `patch_attention(model, sp)`, also as a method of every model."""

from transformers import PreTrainedModel

from .families import heads
from .patch import patch_attention, patched_with, unpatch_attention

PreTrainedModel.patch_attention = patch_attention
PreTrainedModel.unpatch_attention = unpatch_attention

__all__ = ["heads", "patch_attention", "patched_with", "unpatch_attention"]
