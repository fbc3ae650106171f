"""Validation loss, tasks of lm-eval and of local files."""
