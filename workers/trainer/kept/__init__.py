"""Each rank's whole state in its node's shared memory, as it was after the last update: what new ranks go on from when
ranks die. Begin with `slots.py`."""
