"""The planner and its simulator against their bars: a file for each, with `measure`, `targets_of` and `show_rounds`."""
