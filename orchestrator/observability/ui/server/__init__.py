"""The HTTP server: the page's data, what changes, and the access to it."""
