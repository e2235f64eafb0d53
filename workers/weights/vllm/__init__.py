"""The code that runs inside vLLM's processes: how they take weights. Begin with `plugin.py`."""
