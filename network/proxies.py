"""Requests to this machine go to it directly, whatever proxy a user has set for others. Clients of HTTP read from
NO_PROXY or no_proxy whom to ask without one. Hubs, trackers and judges elsewhere keep theirs."""

import os
import socket
from collections.abc import Iterable, Mapping

import psutil

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def names_loopback(host: str) -> bool:
    """Return whether the `Host` of a request, with its port or without, is this machine's loopback.

    >>> names_loopback("[::1]:8000"), names_loopback("localhost"), names_loopback("example.org:80")
    (True, True, False)
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name in LOOPBACK


def own_names() -> list[str]:
    """Names and addresses of this machine."""
    entries = (entry for found in psutil.net_if_addrs().values() for entry in found)
    addresses = (entry.address for entry in entries if entry.family == socket.AF_INET)
    return list(dict.fromkeys([*LOOPBACK, socket.gethostname(), *addresses]))


def without_proxy(environ: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """The environment variables by which this machine, and `hosts`, are asked without a proxy. Those that `environ` has
    set for others stay.

    >>> without_proxy({"NO_PROXY": "*"})
    {'NO_PROXY': '*', 'no_proxy': '*'}
    """
    given = ",".join(environ.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    names = list(dict.fromkeys(name for one in given.split(",") if (name := one.strip())))
    value = "*" if "*" in names else ",".join(dict.fromkeys([*names, *own_names(), *hosts]))
    return {"NO_PROXY": value, "no_proxy": value}


def ask_directly(*hosts: str) -> None:
    """Let this process, and those that it starts, ask this machine and `hosts` without a proxy."""
    os.environ.update(without_proxy(os.environ, hosts))
