"""Placement of actors: which there are, what each reserves, the node of each, and one reservation for all of them."""
