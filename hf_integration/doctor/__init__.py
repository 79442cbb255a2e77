"""The doctor's checks for a transformers model: weights, a small copy's loss and gradients, and an optimizer step."""
