"""How conversations become tokens, and sampled tokens messages."""
