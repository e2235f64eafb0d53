"""Brings what actors print into the run's directory while the run goes on: `logs/NAME.log`, line by line.

    an actor's stdout and stderr ─▶ files of Ray's on its node ─ the node's agent ─▶ Logs ─▶ logs/Rollout-0.log

So the last output of an actor that died is there with its run, even if its node's files are gone. Logs are read from
before the actors start.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from penstock.conf.errors import DeadlineExceeded, PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import outcomes, run_in_thread
from penstock.orchestrator.run_directory.mirror import LOGS
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.runtime.processes import ProcessId

LOOK_S = 2.0
"""Seconds between two looks."""
NODE_S = 0.1
"""Seconds that each node adds to the pause: a hundred nodes are read every ten seconds."""
ANSWER_S = 2.0
"""Deadline for a member to say which process it is; one that is busy is asked again."""
READ_S = 10.0
"""Deadline for an agent to read what its node's members printed."""
MOST_BYTES = 1 << 24
"""Largest size of a member's file. A larger one becomes NAME.before.log, in place of the one before."""


class Logs:
    """Lifecycle: `meet` once the actors are created, `run` until it is cancelled, `look` a last time."""

    def __init__(self, fleet: Fleet, directory: RunDirectory) -> None:
        self._fleet, self._directory = fleet, directory
        self._known: dict[str, tuple[Any, ProcessId]] = {}
        """Handle and process of each present member, by name."""

    def meet(self, timeout_s: float) -> None:
        """Learn which processes there are, before they load anything, and keep what they have printed so far. Waits for
        those that start. Raises `DeadlineExceeded` naming one that does not answer; the caller that starts the members
        tells of one that has died."""
        for answer in run_in_thread(self._look(timeout_s)):
            if isinstance(answer, DeadlineExceeded):
                raise answer

    def last(self) -> None:
        """Keep what was printed until now. For callers without an event loop of their own."""
        run_in_thread(self._look(ANSWER_S))

    async def run(self) -> None:
        while True:
            await self._look(ANSWER_S)
            await asyncio.sleep(max(LOOK_S, NODE_S * len(self._fleet.capacity.nodes)))

    async def _look(self, timeout_s: float) -> Sequence[Any]:
        """Keep what was printed. Returns what new members answered, or failed with."""
        learned = await self._learn(timeout_s)
        by_agent: dict[str, tuple[Any, dict[str, ProcessId]]] = {}
        for name, (_, process) in self._known.items():
            if (found := self._fleet.agent_of(name)) is not None:
                by_agent.setdefault(found[0], (found[1], {}))[1][name] = process
        calls = [(agent, handle.take_output.remote(processes)) for agent, (handle, processes) in by_agent.items()]
        answers = await outcomes(calls, phase="logs", timeout_s=READ_S)
        printed = [told for told in answers if told and not isinstance(told, Exception)]
        if printed:  # most nodes' members print nothing, and one that is gone has nothing more to say
            await asyncio.to_thread(self._write, printed)
        return learned

    async def _learn(self, timeout_s: float) -> Sequence[Any]:
        there = {name: handle for role, name, handle in self._fleet.watched if role != "agent"}
        self._known = {name: known for name, known in self._known.items() if there.get(name) is known[0]}
        new = [(name, handle) for name, handle in there.items() if name not in self._known]
        calls = [(name, handle.process.remote(self._fleet.stacks_root)) for name, handle in new]
        said = await outcomes(calls, phase="logs", timeout_s=timeout_s)
        for (name, handle), answer in zip(new, said, strict=True):
            if (process := ProcessId.from_answer(answer)) is not None:
                self._known[name] = handle, process
        return said

    def _write(self, printed: Sequence[Mapping[str, Sequence[tuple[str, str]]]]) -> None:
        for told in printed:
            for name, lines in told.items():
                self._append(name, lines)

    def _append(self, name: str, lines: Sequence[tuple[str, str]]) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        text = "".join(f"{stamp} {stream} {line}\n" for stream, line in lines)
        with self._directory.failed_writes.tolerating("logs"):
            file = self._directory.path / LOGS / f"{name}.log"
            file.parent.mkdir(exist_ok=True)
            _make_room(file)
            with file.open("a", encoding="utf-8", errors="replace") as opened:
                opened.write(text)


def end_fleet(fleet: Fleet, logs: Logs) -> None:
    """Keep what the fleet's actors printed last, and end them."""
    with contextlib.suppress(PenstockError, RayError):  # of a fleet that was never there
        logs.last()
    fleet.close()


def _make_room(file: Path) -> None:
    if file.exists() and file.stat().st_size > MOST_BYTES:
        os.replace(file, file.with_name(f"{file.stem}.before.log"))
