"""Charts of a run, and the numbers in them."""
