"""Generation with a patched model: prompts are sharded, and each rank stores part of the cache."""
