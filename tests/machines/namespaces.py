"""Namespaces of the kernel, the processes in them, and their end. `machine.py` and `switch.py` build on it.

    owner (a test) ─▶ unshare ─▶ first_process.py     ends with the owner; the kernel ends the rest with it
          └─────────▶ enter.py ─▶ COMMAND             in the namespaces of the first process

Nothing has a name on the host, neither a file nor a network: what is there hangs on the first process alone.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from tests.machines.enter import KINDS

FOLDER = Path(__file__).parent
PYTHON = (f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}", "-IS")
"""Never a warm one (`tests/warm_workers.py`): that is a fork, which cannot become another program."""
"""Starts in 10 ms: the programs here use the standard library only."""
START_S, END_S = 30.0, 30.0
OUTPUT_CHARACTERS = 4000
"""Characters of each stream that an error shows."""
Stream = int | IO[Any] | None


class MachineEnded(RuntimeError):
    """Something was asked of a machine that has ended: it was killed, or its block is over."""


class CommandFailed(subprocess.CalledProcessError):
    """A command on a machine did not end well."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{_end_of(self.stdout)}{_end_of(self.stderr)}"


class CommandTimedOut(subprocess.TimeoutExpired):
    """A command on a machine took too long, and was killed."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{_end_of(self.stdout)}{_end_of(self.stderr)}"


class Namespaces:
    """New namespaces with a first process in them. Lifecycle: made, `start` and `run` any number of times, `end`."""

    def __init__(
        self, name: str, kinds: Sequence[str], settings: Mapping[str, Any] | None = None, options: Sequence[str] = ()
    ) -> None:
        """`kinds`: of `KINDS`. `settings`: see `first_process.py`. `options`: more of them for `unshare`.

        Returns at once, so that several can start at a time; `wait_until_ready` comes next.
        """
        self.name = name
        self._kinds = sum(KINDS[kind] for kind in kinds)
        self._first: int | None = None  # a pidfd
        self._started: list[subprocess.Popen[str]] = []
        program = [*PYTHON, str(FOLDER / "first_process.py")]
        owner = os.pidfd_open(os.getpid())
        try:
            self._unshare = subprocess.Popen(
                ["unshare", *(f"--{kind}" for kind in kinds), *options, "--fork", "--kill-child",
                 *program, str(owner), json.dumps(settings)],
                pass_fds=[owner], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,  # Ctrl-C is for the owner
            )  # fmt: skip
        finally:
            os.close(owner)

    def wait_until_ready(self) -> None:
        assert self._unshare.stdout is not None
        with self._unshare.stdout as said:
            ready, _, _ = select.select([said], [], [], START_S)
            line = said.readline() if ready else f"nothing was heard of it for {START_S:g} s"
            if line != "ready\n":
                self._unshare.kill()
                raise RuntimeError(f"{self.name} did not start: {line}{said.read()}")
        [first] = psutil.Process(self._unshare.pid).children()
        self.pid: int = first.pid
        self._first = os.pidfd_open(self.pid)

    @property
    def alive(self) -> bool:
        return self._first is not None and not select.select([self._first], [], [], 0)[0]

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> subprocess.Popen[str]:
        """`command` in these namespaces; signals to the process go to it. `env`: all of its environment."""
        first = self._descriptor()
        process = subprocess.Popen(
            [*PYTHON, str(FOLDER / "enter.py"), str(first), str(self._kinds), str(cwd or os.getcwd()),
             *map(str, command)],
            pass_fds=[first], env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        input: str | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` does it, with the output as text.

        Raises:
            CommandFailed: if `check`, with the end of its output.
            CommandTimedOut: the command has been killed, what it started has not. With the end of its output.
        """
        words = [str(word) for word in command]
        pipe = subprocess.PIPE
        stdin = subprocess.DEVNULL if input is None else pipe
        process = self.start(words, env=env, cwd=cwd, stdin=stdin, stdout=pipe, stderr=pipe)
        with process:
            try:
                stdout, stderr = process.communicate(input, timeout_s)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise CommandTimedOut(words, timeout_s, error.stdout, error.stderr) from None
            except BaseException:
                process.kill()
                raise
            finally:
                self._started.remove(process)
        if check and process.returncode:
            raise CommandFailed(process.returncode, words, stdout, stderr)
        return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)

    def end(self) -> None:
        """Kill the first process; returns when all processes of the namespace are gone."""
        if self._first is None:
            self._unshare.kill()
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        for process in (self._unshare, *self._started):
            process.wait(END_S)
        if self._first is not None:
            os.close(self._first)
            self._first = None

    def _descriptor(self) -> int:
        if self._first is None or not self.alive:
            raise MachineEnded(f"{self.name} has ended: start commands before it is killed, and within its block")
        return self._first


def _end_of(output: str | bytes | None) -> str:
    """The end of a command's output. After a timeout Python has the output as bytes."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return text[-OUTPUT_CHARACTERS:]
