"""The doctor's checks of a transformers model: its weights, its small copy's loss and gradients, an optimizer step."""
