"""A rank's share of a checkpoint: copied, written in the background, loaded onto any number of ranks."""
