"""HTTP: the page's data, what changes, and who may see it."""
