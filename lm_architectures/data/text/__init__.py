"""Text as tokens: sources are split, tokenized and written as the shards that training reads."""
