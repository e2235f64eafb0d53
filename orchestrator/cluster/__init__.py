"""A run on a Ray cluster: connection, calls and failures of actors, who owns them, and where they are (`fleet/`,
`placement/`, `nodes/`)."""
