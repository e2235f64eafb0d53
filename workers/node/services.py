"""The services that an agent's port has, one byte each: what a connection from another node asks for."""

CHUNKS = 1
"""Of publications: `workers/weights/chain/`."""
ROWS = 2
"""Of the store."""
FILES = 3
"""Models and code: `file_service.py`."""
