"""In-memory checkpoints: each rank's whole state in its node's shared memory, as it was after the last update. New
ranks go on from it when ranks die. Begin with `memory_checkpoint.py`."""
