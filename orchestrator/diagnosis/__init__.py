"""What is wrong with a run, by its own numbers."""
