"""Takeover of a dead command's actors by the next command: nothing is started again, and no step is lost."""
