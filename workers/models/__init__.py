"""What is known of a model without its weights, and models made from nothing."""
