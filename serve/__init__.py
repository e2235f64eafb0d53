"""The server that other people's loops talk to: adapters trained and sampled from, each request carried out once."""
