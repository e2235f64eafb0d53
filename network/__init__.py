"""What two machines of a run say to each other, below everything that they say: who is there, and bytes.

`listener.py` takes connections, `connection.py` makes them; both ends prove first that they know the run's token
(`handshake.py`). Nothing here knows what the bytes mean. Used by the store (rows and calls between machines) and by the
node agents (weights, files).
"""
