"""The work of a policy in an environment, as tokens: turns, the segments that they form, and the columns of a row."""
