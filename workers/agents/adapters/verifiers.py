"""Environments of `verifiers` 0.4: episodes of its v1 protocol, whose model calls arrive over HTTP.

The package pins other versions of openai and mcp than Penstock has. So it lies in an environment of its own, and its
episodes run in a process of that one's interpreter, one for each environment actor:

    python -m venv .venv-verifiers && .venv-verifiers/bin/python -m pip install verifiers==0.4.0 my-taskset
"""

import asyncio
import itertools
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.workers.agents.child_process import LEAVE_S, Child
from penstock.workers.agents.environment import Context, Task, environment

EPISODES = Path(__file__).with_name("verifiers_episodes.py")
START_TIMEOUT_S = 120.0
"""Seconds for importing the package and reading the tasks."""
BLOCK = 1000
"""Tasks of a taskset without end that are shuffled at a time; its first ones are made anew up to the largest number."""


class EpisodeFailed(Exception):
    """The error that verifiers reports for an episode."""


@environment("verifiers")
class Verifiers:
    """Episodes of verifiers, whose tasks are numbers in the taskset. All model calls of an episode are trained, of
    every seat.

    environment:
      name: verifiers
      options:
        python: .venv-verifiers/bin/python
        env: {taskset: {id: my_tasks}, agent: {harness: {id: "null"}, runtime: {type: subprocess}}}
    data: {source: environment}
    """

    def __init__(self, env: Mapping[str, Any], python: str, seat: str = "") -> None:
        """`env`: the `[env]` block of a configuration of verifiers. `python`: the interpreter that has the package.
        `seat`: the one whose reward counts; empty: the mean of all. Raises `ConfigError`."""
        if shutil.which(python) is None:
            raise ConfigError(
                f"environment.options.python={python}: there is no such program. Make an environment for verifiers: "
                "`python -m venv .venv-verifiers && .venv-verifiers/bin/python -m pip install verifiers==0.4.0`."
            )
        # -P: without the neighbours of that file on the path, which are called as packages are
        program = str(Path(python).absolute()) if os.sep in python else python
        self._command = [program, "-P", str(EPISODES)]
        self._config = json.dumps(dict(env))
        self._seat = seat
        self._taskset = env.get("taskset", env)
        self.episodes: _Episodes | None = None
        self._starting = asyncio.Lock()

    def tasks(self, seed: int) -> Iterable[Task]:
        """All tasks of the taskset, shuffled. An endless one is taken a thousand tasks at a time, each thousand
        shuffled."""
        try:
            said = subprocess.run(
                self._command, input=f"{self._config}\n", capture_output=True, text=True, timeout=START_TIMEOUT_S,
                check=True,
            ).stdout  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            tail = str(error.stderr or error)[-1000:]
            raise ConfigError(f"environment.options.env: verifiers cannot make this environment: {tail}") from error
        count, draws = json.loads(said)["tasks"], random.Random(seed)
        indices = _shuffled(draws, range(count)) if count is not None else _shuffled_thousands(draws)
        tasks = (
            Task(str(number), seed + number, {"index": index}, problem=[self._taskset, index])
            for number, index in enumerate(indices)
        )
        return tasks if count is None else list(tasks)

    async def run(self, task: Task, ctx: Context) -> None:
        episodes = await self._started()
        order = {"index": task.data["index"], "seat": self._seat, "base_url": ctx.base_url, "api_key": ctx.api_key}
        ctx.reward(await episodes.play(order))

    async def aclose(self) -> None:
        if self.episodes is not None:
            await self.episodes.end()

    async def _started(self) -> "_Episodes":
        """The process of episodes; started again where the last one has died."""
        async with self._starting:
            if self.episodes is None or self.episodes.has_ended:
                await self.aclose()
                episodes = await _Episodes.start(self._command)
                try:
                    with suppress(ConnectionError):  # `ready` says why
                        await episodes.say(self._config.encode())
                    await episodes.ready()
                except BaseException:
                    await episodes.end()
                    raise
                self.episodes = episodes
            return self.episodes


def _shuffled(draws: random.Random, indices: range) -> Sequence[int]:
    return draws.sample(indices, len(indices))


def _shuffled_thousands(draws: random.Random) -> Iterator[int]:
    for start in itertools.count(step=BLOCK):
        yield from _shuffled(draws, range(start, start + BLOCK))


class _Episodes(Child):
    """Lifecycle: `start`, `ready`, `play` any number of times, also concurrently, `end`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._playing: dict[int, asyncio.Future[float]] = {}
        self._reader: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return super().has_ended or (self._reader is not None and self._reader.done())

    async def ready(self) -> None:
        """Wait until the process is ready. Raises `EpisodeFailed`."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                is_ready = bool(await self.line())
        except TimeoutError:
            is_ready = False
        if not is_ready:
            raise EpisodeFailed(f"verifiers could not be started: {await self.ending(LEAVE_S)}")
        self._reader = asyncio.create_task(self._read_results())

    async def play(self, order: Mapping[str, Any]) -> float:
        """Play an episode; return its reward. Raises `EpisodeFailed`, also where the process dies. Cancelling the call
        ends the episode."""
        number = next(self._numbers)
        self._playing[number] = future = asyncio.get_running_loop().create_future()
        try:
            with suppress(ConnectionError):  # its end says so to all that wait
                await self._say_json({**order, "number": number})
            return await future
        finally:
            del self._playing[number]
            if future.cancelled():
                with suppress(ConnectionError):
                    await self._say_json({"number": number, "cancel": True})

    async def end(self) -> None:
        await super().end()
        if self._reader is not None:
            self._reader.cancel()

    async def _say_json(self, value: Any) -> None:
        await self.say(json.dumps(value).encode())

    async def _read_results(self) -> None:
        while line := await self.line():
            said = json.loads(line)
            future = self._playing.get(said["number"])
            if future is None or future.done():
                continue
            if "error" in said:
                future.set_exception(EpisodeFailed(said["error"]))
            else:
                future.set_result(float(said["reward"]))
        why = f"verifiers: {await self.ending(LEAVE_S)}"
        self.kill()
        for future in self._playing.values():
            if not future.done():
                future.set_exception(EpisodeFailed(why))
