"""A run in short: cards, losses of members, marks on charts. Read by `reporting/` and `ui/`."""
