"""The actors of a run: what makes them, where they run, and how they are replaced."""
