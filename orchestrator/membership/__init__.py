"""The members of a run: how they are watched, replaced, added and removed, and taken over by another command."""
