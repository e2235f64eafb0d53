"""Readers of run directories, which another process may be writing."""
