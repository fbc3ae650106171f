"""Text: sources, tokenizers, shards."""
