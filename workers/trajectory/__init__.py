"""What a policy did in an environment, as tokens: turns, the segments that they form, and the columns of a row."""
