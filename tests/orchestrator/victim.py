"""`penstock run` in a process of its own, on a cluster that outlives it: to be killed."""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence


class Victim:
    """Lifecycle: made, it runs; `wait_until` something has happened; `kill` or `finish`."""

    def __init__(self, words: Sequence[str], python: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [*python, "-m", "penstock.cli.main", "run", *words]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 900) -> None:
        """Wait until it is so, or the command has ended."""
        deadline = time.monotonic() + timeout_s
        while not happened() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=900)

    def finish(self) -> str:
        """What it has said."""
        output, _ = self.process.communicate(timeout=900)
        assert self.process.returncode == 0, output[-3000:]
        return output
