"""Where a step's numbers go: a file each, found by name in `table.py`."""
