"""Which groups make a batch, and how its rows are split over the ranks."""
