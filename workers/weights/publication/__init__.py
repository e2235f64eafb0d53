"""A version of the weights in shared memory: files that ranks write and engines map. Begin with `publication.py`."""
