"""The switch that joins the machines: a bridge in a network of its own. Used by `cluster.py` and `machine.py`.

    machine 1: eth0 ──── p1 ┐
    machine 2: eth0 ──── p2 ┼ br0 10.77.0.254
    machine 3: eth0 ──── p3 ┘

The switch is also the machines' default route, as real ones have it, and leads nowhere: it answers at once that the
rest of the world is unreachable.
"""

import os
import re
from collections.abc import Sequence

from tests.machines.namespaces import Namespaces

NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.254"
LEAST_BURST_BYTES = 512 * 1024
"""Packets have up to 64 KiB before the kernel segments them: with little more, `tbf` is far slower than its rate."""
BURST_S = 0.01
QUEUE_MS = 50
"""Of packets that wait for their turn; what comes on top is dropped, as by a real switch."""
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def address_of(number: int) -> str:
    """Of machine `number`, counted from 1."""
    return f"{NETWORK}.{number}"


def bits_per_s(rate: str) -> float:
    """Of a rate as `tc` takes it, such as `200mbit` or `2.5gbit`."""
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)) is None or not float(match[1]):
        raise ValueError(f"{rate!r} is no rate: write it like 200mbit or 2.5gbit")
    return float(match[1]) * UNITS[match[2]]


def queueing(device: str, rate: str | None) -> list[str]:
    """Words for `tc` that limit what `device` sends; None: to nothing."""
    if rate is None:
        return ["qdisc", "replace", "dev", device, "root", "noqueue"]
    burst = max(LEAST_BURST_BYTES, int(bits_per_s(rate) / 8 * BURST_S))
    return ["qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", f"{burst}b",
            "latency", f"{QUEUE_MS}ms"]  # fmt: skip


class Switch(Namespaces):
    """Lifecycle: made, `open`, machines are plugged in, their ports cut, mended and limited, `end`."""

    def __init__(self) -> None:
        super().__init__("the switch", ["net"])

    def open(self) -> None:
        self.wait_until_ready()
        self.network(["link add br0 type bridge", f"addr add {GATEWAY}/24 dev br0", "link set br0 up"])
        self.do(["sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"])  # of this network, as all below /proc/sys/net

    def plug(self, number: int, pid: int) -> None:
        """The machine whose first process has this `pid` gets its interface `eth0`."""
        port = f"p{number}"
        cable = f"link add {port} type veth peer name eth0 netns {pid}"
        self.network([cable, f"link set {port} master br0", f"link set {port} up"])

    def set_port(self, number: int, state: str) -> None:
        """`state`: `up`, or `down` for a cable that is not there."""
        self.network([f"link set p{number} {state}"])

    def limit(self, number: int, rate: str | None) -> None:
        """What the machine receives."""
        self.do(["tc", *queueing(f"p{number}", rate)])

    def network(self, lines: Sequence[str]) -> None:
        """Commands of `ip`, in one process."""
        self.run(["ip", "-batch", "-"], env=os.environ, input="\n".join(lines))

    def do(self, command: Sequence[str]) -> None:
        self.run(command, env=os.environ)
