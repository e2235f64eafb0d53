"""What the store decides: a pure state machine over groups, and its parts. Begin with `ledger.py`."""
