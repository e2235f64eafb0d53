"""The meeting place of one trainer's ranks before they have process groups: a TCPStore that one process holds.

    rank 0: Meeting(host) ─▶ address ─▶ the controller ─▶ every rank: store_of(rank, num_ranks, address) ─▶ groups

Its port is bound before any rank is told of it, so that no other process can take it meanwhile, and on the node's own
address alone. Process groups then make connections of their own, over the interface that `use_interface_of` has chosen.
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from penstock.conf.errors import DeadlineExceeded, PartnerGone
from penstock.network.machine import interface_of

INTERFACE_KEYS = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Environment variable that each library reads, and how it wants an exact name."""
LOOPBACK = "lo"
TIMEOUT_KEY = "trainer.collective_timeout_s"


class Meeting:
    """Lifecycle: made before the ranks start, `close` once they have parted."""

    def __init__(self, host: str) -> None:
        """`host`: an address of this machine that all ranks can reach."""
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            port = listening.getsockname()[1]
            self.address = f"{host}:{port}"
            self._store: dist.TCPStore | None = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )

    def close(self) -> None:
        self._store = None


def store_of(rank: int, num_ranks: int, address: str, timeout: timedelta) -> dist.TCPStore:
    """Connect to the meeting at `address` (host:port), once all ranks have come. Raises `DeadlineExceeded` with the
    ranks that have not, and `PartnerGone` where no process holds it any more."""
    host, _, port = address.rpartition(":")
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    except dist.DistError as error:
        raise DeadlineExceeded(
            f"rank {rank} of {num_ranks} could not reach rank 0 at {address} within {timeout.total_seconds():g} s "
            f"({first_line(error)}). See that rank 0 lives, and that its node lets this one connect to any port."
        ) from None
    keys = [f"here/{other}" for other in range(num_ranks)]
    try:
        store.set(keys[rank], "")
        store.wait(keys, timeout)
    except dist.DistError as error:
        raise _named(error, store, keys, rank, address, timeout) from None
    return store


def _named(
    error: Exception, store: dist.TCPStore, keys: list[str], rank: int, address: str, timeout: timedelta
) -> DeadlineExceeded | PartnerGone:
    try:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
    except dist.DistError:
        return PartnerGone(
            f"rank {rank} of {len(keys)}: rank 0, who holds the ranks' meeting at {address}, is gone "
            f"({first_line(error)}). What ended it is in its own error."
        )
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
    return DeadlineExceeded(
        f"rank {rank} of {len(keys)}: {who} did not come to {address} within {timeout.total_seconds():g} s. See what "
        f"became of {who}; if it was only slow, raise {TIMEOUT_KEY}."
    )


def use_interface_of(node_address: str) -> None:
    """Have process groups connect over the interface that has this node's address, where the environment names none.
    gloo would take the address that the host's name resolves to, often 127.0.1.1; NCCL whatever interface it finds
    first. A machine that Ray knows by its loopback address alone is the only one."""
    interface = interface_of(node_address)
    if interface is None or interface == LOOPBACK:
        return
    for key, form in INTERFACE_KEYS.items():
        os.environ.setdefault(key, form.format(interface))


def first_line(error: Exception) -> str:
    """First line of torch's message; stacks follow."""
    return str(error).strip().splitlines()[0][:200]
