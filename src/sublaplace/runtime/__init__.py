"""Memory, files, checkpoints and process groups."""
