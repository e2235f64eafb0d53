"""The choice of groups for a batch, and the split of its rows over the ranks."""
