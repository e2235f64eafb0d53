"""Environments that are served by OpenEnv's protocol, over a websocket: an observation is a message, an answer is an
action.

    connect ─▶ reset ─▶ observation as text ─▶ sample ─▶ action ─▶ step ─▶ … ─▶ done ─▶ close

Each attempt has a connection, which is a session of the server's own. Nothing of the package `openenv-core` is needed
here: messages are JSON, `{"type": "reset" | "step" | "close", "data": …}`, and an observation or an error comes back.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.conf.checks import above
from penstock.conf.errors import ConfigError, InfrastructureError, suggest
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.agents.gateway.conversation import Message
from penstock.workers.user_code import find_function

OPTIONS = "environment.options"
MAX_BYTES = 100 * 2**20
"""Largest message, as of the package's own client: observations may be screenshots."""
NOT_SHOWN = ("done", "reward", "metadata")
INVALID = "VALIDATION_ERROR"


@dataclass(frozen=True)
class OpenEnvOptions:
    """The options of a served environment."""

    url: str
    """Address of the server, http:// or ws://, as its own client takes it."""
    reset: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `reset` beside the task's seed."""
    action: str = "message"
    """Field of the action that takes the answer."""
    act: str | None = None
    """`file.py:function` from an answer to a whole action (a dict), None for none, in the place of `action`."""
    shown: str | None = None
    """Field of the observation that the policy reads; `null`: all of them but reward and metadata, as JSON."""
    describe: str | None = None
    """`file.py:function` from an observation (a dict) to a text, in the place of `shown`."""
    prompt: str = "{observation}"
    """First message; {observation} is replaced."""
    penalty: float = 0.0
    """Cost of an answer that is no action, for which nothing else happens."""
    timeout_s: float = 60.0
    """Seconds for each answer of the server. Beyond them the attempt is played again, as after a lost connection."""


class OpenEnvSession:
    """One connection. Lifecycle: `connected` once, `ask` for each message, `close`. Everything but an action that the
    server refuses is an `InfrastructureError`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._socket: Any = None

    async def connected(self) -> "OpenEnvSession":
        from websockets.asyncio.client import connect

        try:
            self._socket = await connect(self._url, open_timeout=self._timeout_s, max_size=MAX_BYTES, proxy=None)
        except (OSError, TimeoutError, ValueError) as error:
            raise InfrastructureError(f"{self._url}: {type(error).__name__}: {error}") from None
        return self

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """The server's observation: {observation, reward, done}. None for an action that it refuses as none."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            text = await asyncio.wait_for(self._socket.recv(), self._timeout_s)
            answer = json.loads(text)
            reply: dict[str, Any] = answer["data"]
        except TimeoutError:
            raise InfrastructureError(f"{self._url}: no answer to {kind} within {self._timeout_s:g} s") from None
        except (ConnectionClosed, OSError, ValueError, KeyError, TypeError) as error:
            raise InfrastructureError(f"{self._url}: {kind}: {type(error).__name__}: {error}") from None
        if answer.get("type") == "observation":
            return reply
        if kind == "step" and reply.get("code") == INVALID:
            return None
        raise InfrastructureError(f"{self._url}: {kind}: {reply.get('code')}: {reply.get('message')}")

    async def close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):  # the server may be gone
                await asyncio.wait_for(self._socket.send('{"type": "close"}'), self._timeout_s)
            with suppress(Exception):
                await asyncio.wait_for(self._socket.close(), self._timeout_s)


@environment("openenv")
class OpenEnv:
    """Served environments, of which a task is a seed of `reset`. Each turn has the reward of its step.

    environment:
      name: openenv
      options: {url: "http://127.0.0.1:8000", action: guess, shown: text}
    data: {source: environment}
    """

    def __init__(self, **options: Any) -> None:
        """`options`: of `OpenEnvOptions`. Raises `ConfigError`."""
        self._options = given = OpenEnvOptions(**options)
        above(f"{OPTIONS}.timeout_s", given.timeout_s, 0)
        scheme, separator, rest = given.url.partition("://")
        if not separator or scheme not in ("http", "https", "ws", "wss"):
            raise ConfigError(f"{OPTIONS}.url={given.url}: begins with none of http://, https://, ws://, wss://.")
        self._url = f"{scheme.replace('http', 'ws')}://{rest.rstrip('/')}/ws"
        self._act: Callable[[str], Any] = (
            find_function(given.act, f"{OPTIONS}.act") if given.act else lambda answer: {given.action: answer}
        )
        self._describe: Callable[[dict[str, Any]], str] = (
            find_function(given.describe, f"{OPTIONS}.describe") if given.describe else self._text
        )

    def tasks(self, seed: int) -> Iterator[Task]:
        game = [self._options.url, dict(self._options.reset)]
        return (Task(str(index), seed + index, problem=[*game, seed + index]) for index in itertools.count())

    async def run(self, task: Task, ctx: Context) -> None:
        session = OpenEnvSession(self._url, self._options.timeout_s)
        try:
            await session.connected()
            result = await session.ask("reset", {"seed": task.seed, **self._options.reset})
            assert result is not None
            text = self._options.prompt.replace("{observation}", self._describe(result.get("observation") or {}))
            messages: list[Message] = [{"role": "user", "content": text}]
            while not result.get("done"):
                turn = await ctx.sample(messages)
                action = self._act(turn.answer)
                answer = None if action is None else await session.ask("step", action)
                if answer is None:
                    ctx.count("no_action")
                    ctx.reward(-self._options.penalty, turn=turn)
                    text = "That is no action."
                else:
                    result = answer
                    ctx.reward(float(result.get("reward") or 0.0), turn=turn)
                    text = self._describe(result.get("observation") or {})
                messages += [turn.message, {"role": "user", "content": text}]
        finally:
            await session.close()

    def _text(self, observation: dict[str, Any]) -> str:
        shown = self._options.shown
        if shown is None:
            return json.dumps({key: value for key, value in observation.items() if key not in NOT_SHOWN})
        if shown not in observation:
            raise ConfigError(
                f"{OPTIONS}.shown={shown}: the observation has no such field{suggest(shown, observation)}"
            )
        return str(observation[shown])
