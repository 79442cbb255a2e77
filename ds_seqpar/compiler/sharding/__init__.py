"""Who holds which tokens and heads: layouts, shards, masks."""
