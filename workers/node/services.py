"""The services that an agent's port has, one byte each: what a connection from another node asks for."""

from penstock.store.data.far.nodes import ROWS

CHUNKS = 1
"""Of publications: `workers/weights/chain/`."""
FILES = 3
"""Models and code: `file_service.py`."""
STATES = 4
"""Kept states of trainers: `states.py`."""

__all__ = ["CHUNKS", "FILES", "ROWS", "STATES"]
