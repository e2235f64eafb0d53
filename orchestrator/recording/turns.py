"""The events between which a process drives a run."""

STARTS = ("start", "resume", "taken_over")
"""Events with which a process takes a run up."""
ENDS = ("end", "failed", "interrupted")
"""Those with which it leaves it."""
