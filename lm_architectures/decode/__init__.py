"""Generating text from any model, and speculative decoding."""
