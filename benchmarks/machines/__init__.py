"""What several machines of a run say to each other, on links of a stated rate: one file for each kind of bytes."""
