"""The parts of an update: rows cut into micro-batches, the loss's arguments, the metrics. The loop around them is
`policy_trainer.py`."""
