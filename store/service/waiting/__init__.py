"""Calls that wait in the store: which of them is next, and how much it gets. No caller polls."""
