"""The papers: commands that reproduce their tables, and their own analyses."""
