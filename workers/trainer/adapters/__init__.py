"""Adapters that take turns in one model. Begin with `slot_trainer.py`."""
