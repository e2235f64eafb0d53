"""Facts on a model without its weights, and models made from nothing."""
