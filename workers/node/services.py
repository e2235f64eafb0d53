"""The services of an agent's port, a byte each: a connection from another node asks for one."""

from penstock.store.data.remote.nodes import ROWS

CHUNKS = 1
"""Service for chunks of publications: `workers/weights/chain/`."""
FILES = 3
"""Service for models and code: `file_service.py`."""
STATES = 4
"""Service for kept states of trainers: `states.py`."""

__all__ = ["CHUNKS", "FILES", "ROWS", "STATES"]
