"""Sinks of a step's metrics: a file each, found by name in `table.py`."""
