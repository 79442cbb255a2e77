"""Generation with a patched model: prompts are sharded, and each rank keeps a part of the cache."""
