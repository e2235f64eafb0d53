"""Python functions as tools of a model."""
