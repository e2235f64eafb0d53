"""The workers' side of the store: leases, writes, heartbeats. Begin with `client.py`."""
