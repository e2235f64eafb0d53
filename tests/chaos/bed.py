"""Where a disturbed run lives: what starts and ends processes there. Used by `disturbance.py`."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tests.chaos.plan import CUT_S
from tests.machines.cluster import ROOT, Cluster


class Bed(Protocol):
    def start(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]: ...

    def signal(self, ip: str, pid: int, number: signal.Signals) -> None: ...

    def cut(self, machine: int) -> None: ...

    def power(self, machine: int) -> None: ...


class OneMachine:
    """This one, with a cluster on it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)

    def start(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=ROOT, env=self._environment, text=True, **streams)

    def signal(self, ip: str, pid: int, number: signal.Signals) -> None:
        os.kill(pid, number)

    def cut(self, machine: int) -> None:
        raise NotImplementedError("one machine has no cable")

    power = cut


class Machines:
    """A cluster of machines; runs are started on the first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def start(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        return self._cluster[1].start(command, cwd=ROOT, **streams)

    def signal(self, ip: str, pid: int, number: signal.Signals) -> None:
        machine = next(machine for machine in self._cluster if machine.address == ip)
        machine.run(["kill", f"-{number}", str(pid)])

    def cut(self, machine: int) -> None:
        self._cluster[machine].cut()
        time.sleep(CUT_S)
        self._cluster[machine].mend()

    def power(self, machine: int) -> None:
        self._cluster[machine].cut()
        self._cluster[machine].kill()
