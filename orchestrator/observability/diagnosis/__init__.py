"""Diagnosis of a run: what is wrong with it, by its own metrics."""
