"""Batches, loaders and documents for ranks that share sequences."""
