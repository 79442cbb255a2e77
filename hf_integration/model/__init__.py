"""The patch of a transformers model: attention, losses and positions."""
