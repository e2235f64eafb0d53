"""The interface of the run to an environment while it plays one attempt."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.conf.errors import Rejected
from penstock.workers.environments.toolbox import Toolbox
from penstock.workers.gateway.formats.conversation import Message
from penstock.workers.gateway.turn_sampler import TurnSampler
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.sandbox import Sandbox
from penstock.workers.trajectory import Turn

T = TypeVar("T")


def finite(reward: Any) -> float:
    """The reward that an environment gives, as a float. Raises `ValueError` for what is no finite number."""
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"a reward is a finite number, not {reward!r}")
    return number


class Context:
    """The context of one attempt.

    An environment's `run(task, ctx)` samples and rewards by it:

        turn = await ctx.sample([{"role": "user", "content": "2 + 2?"}])
        ctx.reward(float(turn.answer.strip() == "4"))
    """

    def __init__(
        self,
        sampler: TurnSampler,
        base_url: str,
        api_key: str,
        make_toolbox: Callable[[Any], Toolbox],
        make_sandbox: Callable[[Limits | None], Sandbox],
        counts: Counter[str] | None = None,
    ) -> None:
        """`counts`: counters of the whole actor, for metrics."""
        self._sampler = sampler
        self._make_toolbox, self._make_sandbox = make_toolbox, make_sandbox
        self._counts = counts if counts is not None else Counter()
        self._toolboxes: dict[tuple[int, ...], tuple[Any, Toolbox]] = {}
        self.base_url = base_url
        """Address where any client of OpenAI's or Anthropic's protocol reaches the policy: what it samples there is
        trained as turns of this attempt."""
        self.api_key = api_key
        """Key for that address, and for this attempt alone."""
        self.surroundings: Any = None
        """What the environment's `setup` has made for this attempt."""
        self.total_reward = 0.0
        self._num_scoring = 0
        self.turn_rewards: dict[int, float] = {}

    async def sample(
        self, messages: Sequence[Message], tools: Any = (), *, train: bool = True, **sampling: Any
    ) -> Turn:
        """Sample the policy's answer to a conversation. A message's content is a text, or a list of texts and pictures
        (`[screen, "What is it?"]`): bytes of a file, or images of PIL's. `tools`: Python functions, OpenAI's
        descriptions, or a `Toolbox`. `sampling`: temperature, max_tokens, stop, structure, … other than the run's.
        `train=False`: the answer is not trained, of an opponent, say. Raises `LimitReached` when the attempt has
        reached a limit; do not catch it."""
        return await self._sampler.sample(messages, self.toolbox(tools).descriptions, train=train, **sampling)

    def toolbox(self, tools: Any) -> Toolbox:
        """Make tools of functions, which can be described and called."""
        if isinstance(tools, Toolbox):
            return tools
        key = tuple(map(id, tools))
        if key not in self._toolboxes:  # with the tools themselves, so that nothing else gets their ids
            self._toolboxes[key] = tuple(tools), self._make_toolbox(tools)
        return self._toolboxes[key][1]

    async def use_tools(self, turn: Turn, tools: Any) -> list[Message]:
        """Make the calls of a turn concurrently; return the messages that answer them. A call that raises, hangs or
        cannot be read is answered too, with what was wrong."""
        return await self.toolbox(tools).answers(turn)

    def sandbox(self, limits: Limits | None = None) -> Sandbox:
        """Return a sandbox for code that the model wrote: `await ctx.sandbox().run_python(code)`. `limits`: other than
        those of environment.sandbox. All attempts of an actor share its workers, and nothing else."""
        return self._make_sandbox(limits)

    def reward(self, value: float, turn: Turn | None = None) -> None:
        """Add to the attempt's reward; with `turn`, to that turn's. Raises `ValueError` for what is no finite
        number."""
        number = finite(value)
        self.total_reward += number
        if turn is not None:
            self.turn_rewards[turn.id] = self.turn_rewards.get(turn.id, 0.0) + number

    async def scored(self, score: Awaitable[T]) -> T:
        """Wait for another party's score of an answer. Where time runs out meanwhile, the attempt has failed and is not
        trained as a wrong one."""
        self._num_scoring += 1
        try:
            return await score
        finally:
            self._num_scoring -= 1

    @property
    def is_scoring(self) -> bool:
        return self._num_scoring > 0

    def reject(self, reason: str, detail: str = "") -> None:
        """End the attempt, which is then not trained, and counted as dropped/rejected_<reason>."""
        raise Rejected(reason, detail)

    def count(self, what: str, number: int = 1) -> None:
        """Add to the metric environment/<what>: of answers that were no move, say."""
        self._counts[what] += number

    @property
    def turns(self) -> list[Turn]:
        """Turns so far, also those that came over HTTP."""
        return self._sampler.turns

    def describe(self) -> Mapping[str, Any]:
        """Environment variables that the clients of an agent in another process read."""
        return {
            "OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": self.api_key,
        }  # fmt: skip
