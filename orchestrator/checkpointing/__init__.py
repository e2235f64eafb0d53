"""Checkpoints of a run: taken while it continues, kept or removed, exported."""
