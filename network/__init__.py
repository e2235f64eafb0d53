"""Connections between two machines of a run, or two processes of one, below their messages: authentication, and bytes.

`listener.py` takes connections, `connection.py` makes them; both ends prove first that they know the run's token.
Nothing here knows what the bytes mean: rows and calls of the store, weights and files of the node agents.
"""
