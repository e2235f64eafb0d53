"""Checkpoints of a run: taken while it goes on, kept or removed, resumed from, exported."""
