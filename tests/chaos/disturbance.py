"""One run, and what is done to it."""

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.bed import Bed
from tests.chaos.plan import COMMAND, CUT, FENCE, KILL, POWER, Fault

STEP_S = 240.0
"""Deadline of the run's next step, and of its end after the last step."""
TRIES, PAUSE_S = 60, 0.5
"""Looks for a member that is just being replaced."""


@dataclass(frozen=True)
class Done:
    """A fault as it was done."""

    who: str
    how: str
    step: int
    """Last step that the run had made."""
    at: float
    """Seconds, by the wall clock of the machine that the run was started on."""


class _Over(Exception):
    """The run has ended before the fault."""


class Disturbed:
    """Lifecycle: `go` once. `command`: of the run, in words; `directory`: which it makes."""

    def __init__(
        self, bed: Bed, python: Sequence[str], words: Sequence[str], directory: Path, retries: int = 0
    ) -> None:
        self._bed, self._python, self.directory = bed, python, directory
        tries = ["--retries", str(retries)] if retries else []
        self._command = [
            *python, "-m", "penstock.cli.main", "run", *tries, *words,
            f"output_dir={directory.parent}", f"name={directory.name}",
        ]  # fmt: skip
        self._log = directory.with_name(f"{directory.name}.log")

    def go(self, faults: Sequence[Fault]) -> list[Done]:
        """The run to its end, through these faults."""
        with self._log.open("w") as log:
            run = self._bed.start(self._command, stdout=log, stderr=subprocess.STDOUT)
            finder = self._bed.start(
                [*self._python, "-m", "tests.chaos.finder"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                self._asked(finder, None)
                done = []
                for fault in faults:
                    with suppress(_Over):
                        done.append(self._do(fault, run, finder))
                self._follow(run)
                assert run.returncode == 0, self._said()
            finally:
                finder.kill()
                run.terminate()
                self._bed.rest()
        return done

    def _do(self, fault: Fault, run: "subprocess.Popen[str]", finder: "subprocess.Popen[str]") -> Done:
        who, how = fault.target.who, fault.target.how
        self._follow(run, fault.step)
        deadline = time.monotonic() + STEP_S
        while not (self.directory / fault.after).exists() and time.monotonic() < deadline:
            self._check_runs(run)
            time.sleep(0.02)
        self._check_runs(run)
        step = self._num_steps()
        time.sleep(fault.delay_s)
        if how == CUT:
            at = time.time()
            self._bed.cut(int(who))
        elif how == POWER:
            at = time.time()
            self._bed.power(int(who))
        elif who == COMMAND:
            at = self._kill_command(run)
        else:
            number = {KILL: signal.SIGKILL, FENCE: None}.get(how, signal.SIGSTOP)
            who, at = self._signal(who, number, run, finder)
        return Done(who, how, step, at)

    def _follow(self, run: "subprocess.Popen[str]", step: int | None = None) -> None:
        """Wait until the run has made so many steps, or has ended."""
        last, deadline = -1, 0.0
        while run.poll() is None:
            now = self._num_steps()
            if step is not None and now >= step:
                return
            if now != last:  # fewer, too: it has returned to a checkpoint
                last, deadline = now, time.monotonic() + STEP_S
            assert time.monotonic() < deadline, f"no step after {now} for {STEP_S:g} s: {self._said()}"
            time.sleep(0.02)

    def _signal(
        self, who: str, number: signal.Signals | None, run: "subprocess.Popen[str]", finder: "subprocess.Popen[str]"
    ) -> tuple[str, float]:
        """Send a signal to a member, once it is there: another's death may have just taken it along; None: kill a fence
        of its. Return who it was, and when."""
        for _ in range(TRIES):
            self._check_runs(run)
            found = self._asked(finder, who)
            if number is None and "pid" in found:
                found = fence_of(found)
            if "pid" in found:
                at = time.time()
                self._bed.signal(found["ip"], found["pid"], number or signal.SIGKILL)
                return found["who"], at
            time.sleep(PAUSE_S)
        raise AssertionError(f"{who} was never there: {found['why_not']}")

    def _check_runs(self, run: "subprocess.Popen[str]") -> None:
        """Raises `_Over` if it has come to its good end."""
        if run.poll() == 0:
            raise _Over
        assert run.poll() is None, f"the run has failed: {self._said()}"

    def _asked(self, finder: "subprocess.Popen[str]", who: str | None) -> dict[str, Any]:
        """Who: None waits until it can be asked."""
        assert finder.stdin is not None
        assert finder.stdout is not None
        if who is not None:
            finder.stdin.write(json.dumps({"directory": str(self.directory), "who": who}) + "\n")
            finder.stdin.flush()
        line = "-"
        while line and not line.startswith("{"):  # Ray has words of its own to say, of a node that is lost
            line = finder.stdout.readline()
        assert line, "the finder has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill_command(self, run: "subprocess.Popen[str]") -> float:
        """The try that is under way, and not the one that starts it anew."""
        own = {f"name={self.directory.name}", f"output_dir={self.directory.parent}"}
        for _ in range(TRIES):
            self._check_runs(run)
            lines = [(one, set(one.info["cmdline"] or [])) for one in psutil.process_iter(["cmdline"])]
            if tries := [one for one, words in lines if own <= words and "--retries" not in words]:
                at = time.time()
                for one in tries:
                    one.kill()
                return at
            time.sleep(PAUSE_S)
        raise AssertionError("the command was never there")

    def _num_steps(self) -> int:
        try:
            return (self.directory / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def fence_of(found: dict[str, Any]) -> dict[str, Any]:
    """One of the fences that a member has started."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(found["pid"]).children():
            if process.name() == "bwrap":
                return {**found, "pid": process.pid}
    return {"why_not": f"{found['who']} has no fence"}
