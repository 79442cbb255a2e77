"""Generation with a patched model. Prompts are sharded, and each rank stores a part of the cache."""
