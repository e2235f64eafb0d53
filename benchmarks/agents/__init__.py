"""Costs of environments and agents: the gateway, waiting for tools, the sandbox, and a peer."""
