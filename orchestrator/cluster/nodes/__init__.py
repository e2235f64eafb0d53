"""The parts of a run on every node that takes part: an agent, files, weights on their way, copies of trainers'
states."""
