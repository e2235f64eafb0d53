"""The agent of a run on every Ray node that takes part, which owns the run's shared memory there. Begin with
`agent.py`."""
