"""One machine of a cluster: its processes, and the cable between it and the switch."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.machines.namespaces import MachineEnded, Namespaces, Stream
from tests.machines.switch import GATEWAY, Switch, address_of, limit

KINDS = ("net", "mount", "pid", "ipc", "uts", "time")
DAY_S = 86400


def hostname_of(number: int) -> str:
    return f"machine{number}"


class Machine:
    """Looks like a machine to its processes: own network, processes, host name, `/tmp`, `/dev/shm` and uptime.

    Files elsewhere are those of the host, as on a shared file system, and so are cores, memory and the time of day,
    for which the kernel has no namespace.

    Lifecycle: made, `wait_until_ready`, `connect`ed, used, and ended by `kill` or with its block.
    """

    def __init__(self, number: int, hosts: str, shm: str, keep: Sequence[Path], switch: Switch) -> None:
        """Returns at once. `hosts`: its `/etc/hosts`. `shm`: size of its `/dev/shm`. `keep`: see `machines`."""
        self.number = number
        self.address = address_of(number)
        self.hostname = hostname_of(number)
        self.environment = {"TMPDIR": "/tmp"}
        """What its processes have beside the environment of this process."""
        self._switch = switch
        self._inside = Namespaces(
            f"machine {number}",
            KINDS,
            {"hostname": self.hostname, "hosts": hosts, "shm": shm, "keep": [str(folder) for folder in keep]},
            # One that has been up for days longer: who compares monotonic times of two machines is found out.
            ["--mount-proc", "--monotonic", str(number * DAY_S), "--boottime", str(number * DAY_S)],
        )

    def wait_until_ready(self) -> int:
        """The host's `pid` of its first process, for the switch."""
        self._inside.wait_until_ready()
        return self._inside.pid

    def connect(self, rate: str | None) -> None:
        """Take the interface that the switch has given it into use. `rate`: of what it sends."""
        lines = [
            "ip link set lo up",
            f"ip addr add {self.address}/24 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via {GATEWAY}",
        ]
        lines += [limit("eth0", rate)] if rate else []
        self.run(["sh", "-e"], input="\n".join(lines))

    @property
    def alive(self) -> bool:
        return self._inside.alive

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> subprocess.Popen[str]:
        """A process on this machine, which ends with it. Signals reach it; its `pid` is the host's.

        `env`: what it has beside this process's environment and the machine's. `cwd`: the current folder, if not said.
        """
        return self._inside.start(
            command, env=self._environment(env), cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr
        )  # fmt: skip

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        input: str | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` on this machine, with the output as text. `env`, `cwd`: as for `start`.

        Raises:
            CommandFailed: if `check`, with the end of its output.
            CommandTimedOut: the command has been killed, what it started has not. With the end of its output.
        """
        return self._inside.run(
            command, env=self._environment(env), cwd=cwd, input=input, timeout_s=timeout_s, check=check
        )

    def rate(self, rate: str | None) -> None:
        """Limit what it sends, and what it receives, to a rate such as `200mbit`; None: no limit."""
        self.run(["sh", "-e"], input=limit("eth0", rate))
        self._switch.limit_port(self.number, rate)

    def cut(self) -> None:
        """Pull the cable at the switch: whatever is sent is lost."""
        self._check()
        self._switch.set_port(self.number, "down")

    def mend(self) -> None:
        """Plug the cable in again. A limit that was set still holds."""
        self._check()
        self._switch.set_port(self.number, "up")

    def kill(self) -> None:
        """End it with all its processes, as by SIGKILL, so the kernel still closes their connections.

        After `cut`, nobody hears of it: so looks a machine that has lost its power. Returns when all of it is gone.
        """
        self._inside.end()

    def link_bytes(self) -> tuple[int, int]:
        """Bytes that its `eth0` has sent and received, headers of Ethernet among them."""
        self._check()
        for line in Path(f"/proc/{self._inside.pid}/net/dev").read_text().splitlines():
            device, _, numbers = line.partition(":")
            if device.strip() == "eth0":
                counts = [int(word) for word in numbers.split()]
                return counts[8], counts[0]
        raise MachineEnded(f"machine {self.number} has no eth0: it ended while it was asked")

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, **self.environment, **(more or {})}

    def _check(self) -> None:
        if not self.alive:
            raise MachineEnded(f"machine {self.number} has ended: nothing can be done with its link any more")
