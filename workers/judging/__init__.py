"""Rewards by a frozen model of the run."""
