"""The places where disturbed runs live: one machine or several. They start and end processes there."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from threading import Timer
from typing import Any, Protocol

from tests.chaos.plan import CUT_S
from tests.machines.cluster import ROOT, Cluster


class Bed(Protocol):
    def start(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]: ...

    def signal(self, ip: str, pid: int, number: signal.Signals) -> None: ...

    def cut(self, machine: int) -> None:
        """The machine's cable is out for `CUT_S`; returns at once."""
        ...

    def power(self, machine: int) -> None: ...

    def rest(self) -> None:
        """Wait until everything that was begun is over."""
        ...


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

    def rest(self) -> None:
        pass


class Machines:
    """A cluster of machines; runs are started on the first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._cuts: dict[int, Timer] = {}

    def start(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        return self._cluster[1].start(command, cwd=ROOT, **streams)

    def signal(self, ip: str, pid: int, number: signal.Signals) -> None:
        machine = next(machine for machine in self._cluster if machine.address == ip)
        machine.run(["kill", f"-{number}", str(pid)])

    def cut(self, machine: int) -> None:
        self._mended(machine)
        self._cluster[machine].cut()
        self._cuts[machine] = Timer(CUT_S, self._cluster[machine].mend)
        self._cuts[machine].start()

    def power(self, machine: int) -> None:
        self._mended(machine)
        self._cluster[machine].cut()
        self._cluster[machine].kill()

    def rest(self) -> None:
        for machine in list(self._cuts):
            self._mended(machine)

    def _mended(self, machine: int) -> None:
        if machine in self._cuts:
            self._cuts.pop(machine).join()
