"""How many files and connections a process may have open.

A process begins with a soft limit, often 1,024, and may raise it up to the hard one by itself. Whoever serves others
does: each of them is a connection. Where the hard limit is low as well, the run says so when it starts.
"""

import resource

LOW = 4096
"""A hard limit below it is told."""
OF_EACH = 6
"""Connections of one client of the store: its calls, its heartbeat, and from another machine those that it keeps to
read rows (`KEPT` in `store/data/far/pulls.py`)."""
OWN = 64
"""What a process has open besides, at most."""


def raise_limit() -> int:
    """Let this process open as many files as it may; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 2**31 - 1


def warning() -> str | None:
    """What a person should know of the hard limit of this process, and those that it starts; None if it is high."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= LOW:
        return None
    served = max(0, hard - OWN) // OF_EACH
    return (
        f"a process may have {hard} files open here (ulimit -Hn), so the store serves at most about {served} members "
        f"of a run. For more, raise the hard limit before the run, or Ray, is started: ulimit -Hn {16 * LOW}, or "
        "nofile in /etc/security/limits.conf."
    )
