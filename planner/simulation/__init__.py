"""A simulated run: the store's ledger and its sharing as they are, on a virtual clock; only durations are a model's."""
