"""Ranks and engines on a Ray cluster, as the server's `Backend`. Begin with `backend.py`."""
