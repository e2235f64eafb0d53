"""What a run has on every Ray node that takes part: an agent, which owns the run's shared memory there. Begin with
`agent.py`."""
