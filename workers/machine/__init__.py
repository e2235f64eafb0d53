"""Helpers for one machine: its files, its processors, its processes."""
