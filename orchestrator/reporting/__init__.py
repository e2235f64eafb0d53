"""What people see of a run: metrics and where they go, the live display, the page, `penstock status`."""
