"""Costs of the death of each member of a run."""
