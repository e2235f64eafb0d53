"""The decisions of the store: a pure state machine over groups, and its parts. Begin with `ledger.py`."""
