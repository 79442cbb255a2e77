"""Assignment of tokens and heads to ranks: layouts, shards and masks."""
