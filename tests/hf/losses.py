"""Models that cannot share sequences as they are: losses that read another part of what they are given, and prompts."""

import peft
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from tests.hf.llama import small


def unshifted_loss(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """Takes shift_labels and shifts labels itself."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses / num_items_in_batch


def local_mean(logits, labels, vocab_size, shift_labels=None, **kwargs):
    """Takes num_items_in_batch and divides by the rank's own tokens."""
    return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


def half_loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **kwargs):
    """Means another loss than the usual one."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), shift_labels.flatten(), ignore_index=-100, reduction="sum")
    return 0.5 * losses / num_items_in_batch


class OwnForwardForCausalLM(LlamaForCausalLM):
    """Gives its loss neither: a fault that no signature shows."""

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, shift_labels=None, **kwargs):
        return super().forward(input_ids=input_ids, labels=labels, shift_labels=shift_labels, **kwargs)


def own_forward():
    return OwnForwardForCausalLM(small(pad_token_id=0).config)


def with_loss(function):
    model = small(pad_token_id=0)
    model.loss_function = function
    return model


def prompt_tuned():
    return peft.get_peft_model(small(pad_token_id=0), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4))
