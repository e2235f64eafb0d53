"""What people see of a run, while it goes on and afterwards: numbers, advice, the live display, pages, trackers; a run
in short: its cards, losses of members, marks on charts."""
