"""Large batches that lie on other nodes: they stay where their writer has put them. Begin with `nodes.py`."""
