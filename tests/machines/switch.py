"""The switch that joins the machines: a bridge in a network of its own.

    machine 1: eth0 ──── p1 ┐
    machine 2: eth0 ──── p2 ┼ br0 10.77.0.254
    machine 3: eth0 ──── p3 ┘

The switch is also the machines' default route, as real ones have it, and leads nowhere: it answers at once that the
rest of the world is unreachable.
"""

import os
import re
from collections.abc import Mapping

from tests.machines.namespaces import Namespaces

NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.254"
LEAST_BURST_BYTES = 512 * 1024
"""Packets have up to 64 KiB before the kernel segments them: with little more, `tbf` is far slower than its rate."""
BURST_S = 0.01
QUEUE_MS = 50
"""Longest queue of packets that wait for their turn. Further packets are dropped, as by a real switch."""
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def address_of(number: int) -> str:
    """The address of machine `number`, counted from 1."""
    return f"{NETWORK}.{number}"


def port_of(number: int) -> str:
    return f"p{number}"


def bits_per_s(rate: str) -> float:
    """Bits a second of a rate as `tc` takes it, such as `200mbit` or `2.5gbit`."""
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)) is None or not float(match[1]):
        raise ValueError(f"{rate!r} is no rate: write it like 200mbit or 2.5gbit")
    return float(match[1]) * UNITS[match[2]]


def limit(device: str, rate: str | None) -> str:
    """A command that limits what `device` sends; None: to nothing."""
    if rate is None:
        return f"tc qdisc replace dev {device} root noqueue"
    burst = max(LEAST_BURST_BYTES, int(bits_per_s(rate) / 8 * BURST_S))
    return f"tc qdisc replace dev {device} root tbf rate {rate} burst {burst}b latency {QUEUE_MS}ms"


class Switch(Namespaces):
    """Lifecycle: made, `open`ed, cables cut, mended and limited, `end`ed."""

    def __init__(self) -> None:
        super().__init__("the switch", ["net"])

    def open(self, first_processes: Mapping[int, int], rate: str | None) -> None:
        """Give machines their interface `eth0`. `first_processes`: of each by its number. `rate`: see `limit`."""
        self.wait_until_ready()
        lines = [
            "ip link add br0 type bridge",
            f"ip addr add {GATEWAY}/24 dev br0",
            "ip link set br0 up",
            "echo 1 >/proc/sys/net/ipv4/ip_forward",  # of this network, as all that is below /proc/sys/net
        ]
        for number, pid in first_processes.items():
            port = port_of(number)
            lines += [f"ip link add {port} type veth peer name eth0 netns {pid}", f"ip link set {port} master br0 up"]
            lines += [limit(port, rate)] if rate else []
        self.do(*lines)

    def set_port(self, number: int, state: str) -> None:
        """`state`: `up`, or `down` for a cable that is not there."""
        self.do(f"ip link set {port_of(number)} {state}")

    def limit_port(self, number: int, rate: str | None) -> None:
        """What the machine receives."""
        self.do(limit(port_of(number), rate))

    def do(self, *lines: str) -> None:
        """Commands of a shell."""
        self.run(["sh", "-e"], env=os.environ, input="\n".join(lines))
