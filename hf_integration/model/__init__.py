"""The patch of a transformers model: attention, losses, positions."""
