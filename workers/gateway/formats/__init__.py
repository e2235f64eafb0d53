"""Formats that turn conversations into tokens, and sampled tokens into messages."""
