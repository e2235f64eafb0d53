"""The server that other people's loops talk to: adapters are trained and sampled from by requests, exactly once each.
Begin with `command.py`."""
