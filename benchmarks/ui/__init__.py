"""The page of runs over much data, and the cost of recording for a run."""
