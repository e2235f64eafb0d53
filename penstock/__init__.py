"""Penstock: reinforcement learning for language models as a dataflow of columns."""
