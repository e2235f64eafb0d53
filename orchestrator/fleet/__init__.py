"""The actors of a run: who makes them, where they go, and how others take their place."""
