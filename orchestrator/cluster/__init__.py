"""A run on a Ray cluster: connection, calls and failures of actors, and where the actors are (`fleet/`, `placement/`,
`nodes/`, `ownership/`)."""
