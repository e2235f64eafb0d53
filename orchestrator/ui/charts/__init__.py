"""Which charts a run has, and the numbers in them."""
