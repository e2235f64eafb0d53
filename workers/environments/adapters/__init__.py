"""Environments of other packages, a small module each."""
