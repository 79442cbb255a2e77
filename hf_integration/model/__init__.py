"""Patch the attention, losses and positions of transformers models."""
