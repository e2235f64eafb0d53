"""Weight transfer between machines: chunks of a publication go down chains of nodes. Begin with `relay.py`."""
