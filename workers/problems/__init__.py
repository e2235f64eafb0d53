"""Procedural problems of other packages, which prompts, environments and rewards share."""
