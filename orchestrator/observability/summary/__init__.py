"""A run in short: cards, losses of members, marks on charts."""
