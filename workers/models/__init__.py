"""Models made from nothing: see `fresh.py`."""
