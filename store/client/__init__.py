"""How workers speak to the store: leases, writes, heartbeats. Begin with `client.py`."""
