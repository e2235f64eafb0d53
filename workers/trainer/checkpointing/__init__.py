"""A rank's share of a checkpoint: copied, written behind its back, loaded onto any number of ranks."""
