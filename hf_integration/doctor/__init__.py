"""The doctor's checks of a transformers model: weights, loss and gradients of a small copy, and an optimizer step."""
