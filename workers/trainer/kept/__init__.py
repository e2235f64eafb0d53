"""Each rank's whole state in its node's shared memory, as it was after the last update: new ranks go on from it when
ranks die. Begin with `slots.py`."""
