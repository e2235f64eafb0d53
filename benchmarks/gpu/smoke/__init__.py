"""The ten steps that fail first on GPUs, in order: `make gpu-smoke`. Begin with `__main__.py`."""
