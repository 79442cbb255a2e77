"""Batches, loaders and documents of ranks that share sequences."""
