"""A model of the flash-attn package: its private functions with their signatures from 2.7 on."""
