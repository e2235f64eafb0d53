"""Addresses of this machine: which network interface has one."""

import socket

import psutil


def interface_of(address: str) -> str | None:
    """The network interface that has this address, such as `eth0`; None if it is none of this machine's."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address.partition("%")[0] == address:
                return str(name)
    return None
