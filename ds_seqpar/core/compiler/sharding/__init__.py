"""Distribution of tokens and heads over ranks: layouts, shards and masks."""
