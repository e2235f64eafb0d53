"""Reports of a run for people: metrics and where they go, the live display, the page, `penstock status`."""
