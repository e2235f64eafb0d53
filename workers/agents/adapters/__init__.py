"""Adapters for environments of other packages, a small module each."""
