"""One training run: settings, model files, folder, checkpoints, dry run, loading."""
