"""A run on a Ray cluster: connection, calls of actors, who owns them, the agents of its nodes, the way of the weights,
and which actors there are (`fleet/`) on which nodes (`placement/`)."""
