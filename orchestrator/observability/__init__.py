"""What people see of a run, while it goes on and afterwards: numbers, advice, the live display, pages, trackers."""
