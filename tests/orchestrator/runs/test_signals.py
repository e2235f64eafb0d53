"""A run that is told to end as schedulers, shells and terminals do it, and one whose Ray dies: it ends in order, and
nothing is left behind."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from penstock.workers.runtime.processes import ProcessId
from tests.processes import wait_until_gone
from tests.run_files import metrics_of

PATIENCE_S = 900
INTERRUPTED = 130
NAME = f"told-{os.getpid()}"
"""Name of the run, which no other run of the machine has."""
MARK = "PENSTOCK_TEST_OF_SIGNALS"
"""Variable that the processes of the run have."""


class Run:
    """A run of the command line, from its first step until it has ended."""

    def __init__(self, words: Sequence[str], directory: Path, before: Sequence[str] = (), **options: object) -> None:
        """`before`: words before the command, such as `timeout`'s."""
        self.directory = directory / NAME
        command = [*before, sys.executable, "-m", "penstock.cli.main", "run", *words]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {MARK: NAME}
        self.output = directory / "output.txt"
        with self.output.open("wb") as output:
            options = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, **options}
            self.process = subprocess.Popen(command, env=environment, **options)  # type: ignore[call-overload]

    def until_a_step(self) -> None:
        file, deadline = self.directory / "metrics.jsonl", time.monotonic() + PATIENCE_S
        while not (file.exists() and file.stat().st_size):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.1)
        self.tree = [ProcessId.of(child.pid) for child in self.processes()]

    def processes(self) -> list[psutil.Process]:
        """All that the run has started, guards that have left it too: they have its environment."""
        return [process for process in psutil.process_iter() if _environment(process).get(MARK) == NAME]

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")[-4000:]

    def events(self) -> list[str]:
        return [json.loads(line)["kind"] for line in (self.directory / "events.jsonl").read_text().splitlines()]

    def saved(self) -> list[int]:
        """Steps of the checkpoints that are whole."""
        found = self.directory.glob("checkpoints/*/COMPLETE")
        return sorted(int(path.parent.name.removeprefix("global_step_")) for path in found)

    def has_ended(self) -> int:
        """The exit code, once nothing is left of the run."""
        code = self.process.wait(PATIENCE_S)
        assert (self.directory / "report.html").exists(), self.said
        wait_until_gone(self.tree)
        assert not list(Path("/dev/shm").glob(f"penstock-{NAME}-*"))
        return code

    def close(self) -> None:
        for child in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # it has ended, or is another user's
        return {}


@pytest.fixture
def start(small_run: list[str], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run that goes on until it is told to end."""
    runs: list[Run] = []

    def started(*words: str, **options: object) -> Run:
        all_words = [
            *small_run,
            "rollout.engine=hf",
            "trainer.max_steps=100000",
            f"output_dir={tmp_path}",
            f"name={NAME}",
        ]
        runs.append(Run([*all_words, *words], tmp_path, **options))  # type: ignore[arg-type]
        runs[-1].until_a_step()
        return runs[-1]

    yield started
    for run in runs:
        run.close()


@pytest.mark.real
def test_timeout_ends_a_run_with_its_checkpoint_and_its_report(start: Callable[..., Run]) -> None:
    """`timeout` sends SIGTERM to the command and to its process group: the command hears it twice."""
    words = ["checkpoint.every_steps=100000", f"faults.preemption_s={PATIENCE_S}"]
    run = start(*words, before=["timeout", "--signal=TERM", "--preserve-status", "1d"])
    run.process.send_signal(signal.SIGALRM)  # by which its own timer tells it that the time is over
    assert run.has_ended() == INTERRUPTED, run.said
    assert run.events()[-3:] == ["checkpoint", "preempted", "interrupted"]
    assert run.saved() == [metrics_of(run.directory)[-1]["step"]]


@pytest.mark.real
def test_a_signal_to_every_process_ends_a_run_without_ray(start: Callable[..., Run]) -> None:
    """As systemd (KillMode=control-group) and Slurm send it: Ray's daemons die at the same moment."""
    run = start("checkpoint.every_steps=1", f"faults.preemption_s={PATIENCE_S}")
    deadline = time.monotonic() + PATIENCE_S
    while not run.saved() and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in reversed(run.processes()):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGTERM)
    assert run.has_ended() == INTERRUPTED, run.said
    assert run.events()[-1] == "interrupted"
    assert run.saved()


@pytest.mark.real
def test_a_terminal_that_is_closed_ends_a_run(start: Callable[..., Run]) -> None:
    """Its process group hears SIGHUP, and what it prints then comes nowhere."""
    ours, theirs = pty.openpty()
    run = start(stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_take_terminal)
    os.close(theirs)
    os.close(ours)
    assert run.has_ended() == INTERRUPTED
    assert run.events()[-1] == "interrupted"


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.real
def test_a_run_that_is_killed_leaves_no_ray(start: Callable[..., Run]) -> None:
    run = start()
    run.process.kill()
    run.process.wait(PATIENCE_S)
    wait_until_gone(run.tree)
    assert not list(Path("/dev/shm").glob(f"penstock-{NAME}-*"))


@pytest.mark.real
def test_a_run_whose_ray_dies_fails_and_says_so(start: Callable[..., Run]) -> None:
    run = start()
    for child in run.processes():
        if child.name() == "gcs_server":
            child.kill()
    assert run.has_ended() == 1, run.said
    assert run.events()[-1] == "failed"
    assert "Ray has ended" in run.said
