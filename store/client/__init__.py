"""The workers' side of the store: leases, writes, heartbeats. Begin with `store_client.py`."""
