"""What environments and agents cost: the gateway, waiting for tools, the sandbox, and a peer."""
