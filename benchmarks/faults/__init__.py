"""What the death of each member of a run costs."""
