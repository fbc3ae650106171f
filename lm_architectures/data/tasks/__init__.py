"""Built-in data, a text or a synthetic task in each file."""
