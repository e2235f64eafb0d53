"""Owners of a run's actors, in Ray's sense: actors end with their owner, a process or an actor that outlives it."""
