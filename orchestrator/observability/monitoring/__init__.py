"""Monitoring of a run while it goes on: which actors were busy when, which wait for which, and what they printed."""
