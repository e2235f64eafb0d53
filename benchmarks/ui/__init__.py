"""The page of runs over much data, and what recording costs a run."""
