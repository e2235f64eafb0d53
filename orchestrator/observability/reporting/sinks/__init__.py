"""Sinks of a step's metrics, by name in `table.py`: those of this machine in `sink.py`, trackers in a file each."""
