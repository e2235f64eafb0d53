"""The actors of a run: what makes them, where they go, and how others take their place."""
