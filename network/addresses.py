"""Addresses of this machine: which network interface has one, and ports that are free."""

import socket

import psutil


def interface_of(address: str) -> str | None:
    """The network interface that has this address, such as `eth0`; None if no interface of this machine has it."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address.partition("%")[0] == address:
                return str(name)
    return None


def free_address(host: str) -> str:
    """A `host:port` whose port no process listens on now, for libraries that want to be told where to listen. A caller
    that can listens on port 0 instead, and reads the port that it got."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
