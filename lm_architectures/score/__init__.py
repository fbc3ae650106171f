"""Validation loss, and tasks of lm-eval, also from local files."""
