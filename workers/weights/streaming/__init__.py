"""The transfer of a version of the weights from GPU to GPU, without a file. Begin with `senders.py`."""
