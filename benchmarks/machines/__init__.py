"""Traffic between machines of a run, on links of a stated rate: one file for each kind of bytes."""
