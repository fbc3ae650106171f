"""The border to Hugging Face: import, export, tokenizers."""
