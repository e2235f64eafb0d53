"""A tracker that does what a test says."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.reporting.trackers import About, End, Opened, Sender
from penstock.orchestrator.run_directory.run_directory import RunDirectory

PATIENCE_S = 60.0
"""Deadline of what happens at once unless something is wrong."""


def new_run(place: Path, *words: str) -> RunDirectory:
    return RunDirectory.create(load_config([f"output_dir={place}", "name=run", *words]))


def about(directory: RunDirectory) -> About:
    return About("run", "group", None, {"recipe": "none"}, {"seed": 1}, directory.path)


class Scripted:
    """`calls` has what it was told. `before(call)`: may raise, or not return."""

    def __init__(self, before: Callable[[str], None] = lambda call: None) -> None:
        self.calls: list[str] = []
        self.ids: list[str | None] = []
        self.numbers: list[dict[str, float]] = []
        self.end: End | None = None
        self._before = before

    def open(self, about: About, id: str | None) -> Opened:
        self._before("open")
        self.calls.append("open")
        self.ids.append(id)
        return Opened(id or "new", "its page")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._before(str(step))
        self.calls.append(str(step))
        self.numbers.append(dict(numbers))

    def finish(self, end: End) -> None:
        self._before("finish")
        self.calls.append("finish")
        self.end = end


class Gate:
    """A `before` that holds some calls up until it is opened."""

    def __init__(self, *held: str) -> None:
        self._held = held
        self._open, self.reached = threading.Event(), threading.Event()

    def __call__(self, call: str) -> None:
        if call in self._held:
            self.reached.set()
            assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


def sender_to(
    tracker: Scripted, directory: RunDirectory, timeout_s: float = PATIENCE_S, pause_s: float = 0.0, most: int = 1_000
) -> tuple[Sender, list[str]]:
    """One that has begun, and what people are told."""
    told: list[str] = []
    directory.failed_writes.set_printer(told.append)
    sender = Sender("tracker", tracker, about(directory), directory, timeout_s, pause_s, most)
    sender.begin()
    return sender, told


def until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def sent(sender: Sender, *steps: int) -> None:
    """These steps, and the run's end."""
    for step in steps:
        sender.log(step, {"step": step, "loss": 1.0, "note": "no number"})
    sender.finish(End("finished"))
    sender.close()
