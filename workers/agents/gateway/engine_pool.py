"""The choice of the engine that answers: the one that has the conversation's prefix, unless another has much less to
do.

An engine that dies in a turn costs that turn: it is sampled again, by another engine or by the one that takes its
place. Its tokens were in no history yet. `members` come from the controller. Where policies are whole models, the
engines of a turn are those of its policy.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from penstock.conf.errors import DeadlineExceeded, WorkerDied
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import Completion, Sampling

SLACK = 8
"""Number of requests that a conversation's own engine may have more than another one, before the conversation moves
there and its prefix is read again."""
FAILED_S = 1.0
"""Seconds during which an engine that failed is asked only if there is no other."""


class Engines(Protocol):
    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        conversation: object,
        pictures: PromptPictures | None = None,
    ) -> Completion:
        """Sample a response. `conversation`: whose prefix an engine may have. `pictures`: of the prompt, whose tokens
        are expanded; None for none. Raises `DataError`, `DeadlineExceeded`."""


AskEngine = Callable[..., Awaitable[Completion]]
"""Function that asks an engine: (handle, prompt_ids, sampling), and pictures for a prompt that has some. Raises
`WorkerDied` for an engine that is gone."""


class EnginePool:
    """Lifecycle: `update` whenever the engines change, `sample` at any time: it waits until there is one."""

    def __init__(
        self,
        call: AskEngine,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        policies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`timeout_s`: limit of a turn, waiting for an engine included. `policies`: the policy whose model an engine
        has, by the engine's name; an engine that is not there has all."""
        self._call, self._timeout_s, self._clock, self._policies = call, timeout_s, clock, policies
        self._members: dict[str, Any] = {}
        self._in_flight: dict[str, int] = {}
        self._failed: dict[str, float] = {}
        self.engine_of: WeakKeyDictionary[object, str] = WeakKeyDictionary()
        """The engine that each conversation was on, as long as the conversation exists."""
        self._prefixes: WeakKeyDictionary[object, dict[str, str]] = WeakKeyDictionary()
        """The engine that has the prefix of each conversation, by policy."""
        self._changed = asyncio.Event()
        self.num_again = 0
        """Number of turns that were sampled again, as their engine was lost."""

    @property
    def names(self) -> set[str]:
        """Names of the engines that serve now."""
        return set(self._members)

    @property
    def members(self) -> Mapping[str, Any]:
        """Handles of the engines that serve now, by name."""
        return self._members

    def update(self, members: Mapping[str, Any]) -> None:
        """Set the engines that serve now, by name."""
        for name in self._members.keys() - members.keys():
            self._failed.pop(name, None)
        for name, handle in members.items():
            if self._members.get(name) is not handle:
                self._failed.pop(name, None)
        self._members = dict(members)
        self._changed.set()
        self._changed = asyncio.Event()

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        conversation: object,
        pictures: PromptPictures | None = None,
    ) -> Completion:
        seen = () if pictures is None else (pictures,)
        deadline = self._clock() + self._timeout_s
        while True:
            name = await self._choose(conversation, sampling.policy, deadline)
            self.engine_of[conversation] = self._prefixes.setdefault(conversation, {})[sampling.policy] = name
            self._in_flight[name] = self._in_flight.get(name, 0) + 1
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock())):
                    return await self._call(self._members[name], prompt_ids, sampling, *seen)
            except WorkerDied:
                self._failed[name] = self._clock()
                self.num_again += 1
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{name} did not answer a turn within {self._timeout_s:g} s. Raise rollout.generate_timeout_s or "
                    "lower rollout.sampling.max_tokens."
                ) from None
            finally:
                self._in_flight[name] -= 1

    async def _choose(self, conversation: object, policy: str, deadline: float) -> str:
        while not (available := [name for name in self.available() if self._policies.get(name, policy) == policy]):
            left = deadline - self._clock()
            if left <= 0:
                of_policy = f" of policy {policy}" if self._policies else ""
                raise DeadlineExceeded(f"no engine{of_policy} was there to sample a turn within {self._timeout_s:g} s.")
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), min(left, FAILED_S))
            except TimeoutError:
                continue
        least = min(available, key=lambda name: (self.load(name), available.index(name)))
        own = self._prefixes.get(conversation, {}).get(policy)
        return own if own in available and self.load(own) <= self.load(least) + SLACK else least

    def available(self) -> list[str]:
        """Engines that did not fail just now."""
        now = self._clock()
        return [name for name in self._members if now - self._failed.get(name, -FAILED_S) >= FAILED_S]

    def load(self, name: str) -> int:
        return self._in_flight.get(name, 0)
