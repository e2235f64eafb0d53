"""Arguments and results of the calls that servers and sessions make: plain data."""
