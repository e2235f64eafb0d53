"""This machine on the network: its addresses, free ports, requests to itself without a proxy, and the limit on files
and connections that a process may have open.

Clients of HTTP read from NO_PROXY or no_proxy which hosts to ask without a proxy: this machine is added to what a user
has set. Hubs, trackers and judges elsewhere keep their proxy.

A process begins with a soft limit of open files, often 1,024, and may raise it up to the hard one by itself. A process
that serves others does: each of them is a connection. Where the hard limit is low as well, the run says so when it
starts.
"""

import os
import resource
import socket
from collections.abc import Iterable, Mapping

import psutil

LOW_LIMIT = 4096
"""The limit to warn below."""
FILES_PER_CLIENT = 6
"""Connections of one client of the store: its calls, its heartbeat, and from another machine those that it keeps to
read rows (`MOST_IDLE` in `store/data/remote_rows.py`)."""
OWN_FILES = 64
"""The most files that a process has open besides."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def interface_of(address: str) -> str | None:
    """The network interface that has this address, such as `eth0`; None if no interface of this machine has it."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address.partition("%")[0] == address:
                return str(name)
    return None


def free_address(host: str) -> str:
    """A `host:port` whose port no process listens on now, for libraries that need an address to listen on. A caller
    that can listens on port 0 instead, and reads the port that it got."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def raise_limit() -> int:
    """Let this process open as many files as it may. Returns how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 2**31 - 1


def warning() -> str | None:
    """A warning about the hard limit of this process, and of those that it starts; None if the limit is high."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= LOW_LIMIT:
        return None
    served = max(0, hard - OWN_FILES) // FILES_PER_CLIENT
    return (
        f"a process may have {hard} files open here (ulimit -Hn), so the store serves at most about {served} members "
        f"of a run. For more, raise the hard limit before the run, or Ray, is started: ulimit -Hn {16 * LOW_LIMIT}, or "
        "nofile in /etc/security/limits.conf."
    )


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


def no_proxy_variables(environ: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """The environment variables by which this machine, and `hosts`, are asked without a proxy. Those that `environ` has
    set for other hosts stay.

    >>> no_proxy_variables({"NO_PROXY": "*"})
    {'NO_PROXY': '*', 'no_proxy': '*'}
    """
    given = ",".join(environ.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    names = list(dict.fromkeys(name for one in given.split(",") if (name := one.strip())))
    value = "*" if "*" in names else ",".join(dict.fromkeys([*names, *own_names(), *hosts]))
    return {"NO_PROXY": value, "no_proxy": value}


def bypass_proxy(*hosts: str) -> None:
    """Let this process, and those that it starts, ask this machine and `hosts` without a proxy."""
    os.environ.update(no_proxy_variables(os.environ, hosts))
