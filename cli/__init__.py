"""The command line. Begin with `main.py`."""
