"""The store as a process: calls that wait, the actor and its socket, snapshots. Begin with `store.py`."""
