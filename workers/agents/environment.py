"""Environments: the interface, its tasks, the context of an attempt, and the lookup by name.

    class Guess:
        def tasks(self, seed):
            for index in itertools.count():
                yield Task(str(index), seed + index, {"number": ...})

        async def run(self, task, ctx):
            messages = [{"role": "user", "content": "Guess my number."}]
            while True:
                turn = await ctx.sample(messages)
                ...
                ctx.reward(1.0)

An environment samples from the policy at any time and in any number of conversations. It need not know of tokens,
weights or batches. `environment.name` names a registered one, `file.py:Class` or `package.module:Class`, and
`environment.options` are its keyword arguments.
"""

import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, Unpack

from penstock.algorithms.graph.columns import ENVIRONMENT_TASK, TASK_MESSAGES
from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import ConfigError, Rejected, suggest
from penstock.conf.secret import reveal
from penstock.workers.agents.gateway.conversation import Message
from penstock.workers.agents.gateway.turn_sampler import TurnSampler
from penstock.workers.agents.toolbox import Toolbox
from penstock.workers.agents.trajectory import Turn
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.sandbox import Sandbox
from penstock.workers.sandbox.workspace import Workspace, WorkspaceOptions
from penstock.workers.user_code import find_function, import_file

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
BUILTIN = {
    name: f"penstock.workers.agents.adapters.{name}"
    for name in (
        "agent",
        "gymnasium",
        "harbor",
        "repository",
        "textarena",
        "reasoning_gym",
        "verifiers",
        "tools",
        "mcp",
        "openenv",
    )
}
"""Modules that register environments, by the environment's name."""
ENVIRONMENTS: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Task:
    """A task, the same for all attempts of a group."""

    id: str
    seed: int
    """Seed of what is random in the environment; the policy's sampling has its own."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data as JSON: what the environment needs to know, or the row of a dataset."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation that a row of a dataset begins with: `data.system_prompt`, what was said before, the question. A
    content with pictures is a list of parts, `{type: text, text}` and `{type: image, image: bytes}`. Empty for a task
    of the environment's own."""
    problem: Any = None
    """Identity among tasks, as JSON; None: its data, or its seed where it has none. Where these identify it only for
    one setting of the environment's options, those belong in here, too. No step trains on a problem that evaluation
    measures."""

    @property
    def identity(self) -> Any:
        if self.problem is not None:
            return self.problem
        return dict(self.data) or self.seed

    def as_columns(self) -> Mapping[str, Any]:
        """The task in the place of a dataset's columns."""
        return {ENVIRONMENT_TASK: {"id": self.id, "seed": self.seed, "data": dict(self.data)}}

    @classmethod
    def from_json(cls, text: str, pictures: Sequence[Any] = ()) -> "Task":
        """Read the `task` column: an environment's own task, or a row of a dataset, whose number is its id and seed.
        `pictures`: bytes of the row's pictures, in the order of the parts that stand for them."""
        columns = json.loads(text)
        if ENVIRONMENT_TASK not in columns:
            left = iter(pictures)
            messages = [_with_pictures(message, left) for message in columns.pop(TASK_MESSAGES, ())]
            return cls(str(columns["index"]), int(columns["index"]), columns, messages)
        value = columns[ENVIRONMENT_TASK]
        return cls(str(value["id"]), int(value["seed"]), value["data"])


def _with_pictures(message: Mapping[str, Any], pictures: Iterator[Any]) -> Mapping[str, Any]:
    if isinstance(content := message["content"], str):
        return message
    parts = [{"type": "image", "image": bytes(next(pictures))} if part["type"] == "image" else part for part in content]
    return {**message, "content": parts}


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
        make_workspace: Callable[..., AbstractAsyncContextManager[Workspace]],
        counts: Counter[str] | None = None,
    ) -> None:
        """`counts`: counters of the whole actor, for metrics."""
        self._sampler = sampler
        self._make_toolbox, self._make_sandbox = make_toolbox, make_sandbox
        self._make_workspace = make_workspace
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
        self.policy_rewards: dict[str, float] = dict.fromkeys(sampler.policies if sampler.speaker else (), 0.0)
        """What each policy is given beyond what all are, where several are trained."""
        self._num_scoring = 0
        self.turn_rewards: dict[int, float] = {}

    async def sample(
        self,
        messages: Sequence[Message],
        tools: Any = (),
        *,
        train: bool = True,
        state: str | None = None,
        policy: str | None = None,
        **sampling: Any,
    ) -> Turn:
        """Sample the policy's answer to a conversation. A message's content is a text, or a list of texts and pictures
        (`[screen, "What is it?"]`): bytes of a file, or images of PIL's. `tools`: Python functions, OpenAI's
        descriptions, or a `Toolbox`. `sampling`: temperature, max_tokens, stop, structure, … other than the run's.
        `train=False`: the answer is not trained, of an opponent, say. `state`: text that is equal where attempts at the
        task stand before the same choice, for `algorithm.advantage=gigpo`; None: what was said since the last turn.
        `policy`: which of several that are trained (`flow.train`); None: that of `flow.rollout`. Raises `LimitReached`
        when the attempt has reached a limit; do not catch it."""
        descriptions = self.toolbox(tools).descriptions
        return await self._sampler.sample(messages, descriptions, train=train, state=state, policy=policy, **sampling)

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

    def workspace(
        self, source: str | os.PathLike[str], **options: Unpack[WorkspaceOptions]
    ) -> AbstractAsyncContextManager[Workspace]:
        """Open a copy-on-write tree for commands that the model wrote, one after the other and with state:
        `async with ctx.workspace("repository.tar.gz") as ws: await ws.run("ls")`. `source`: a directory or an archive,
        unpacked once a node. `options`: `at` (its directory inside), `root` (it is a whole file system), `show` (paths
        of this machine that commands may read), `links`, `variables`, `limits`, `disk` (a directory for what is
        changed, which else stays in memory)."""
        return self._make_workspace(source, **options)

    def reward(self, value: float, turn: Turn | None = None, *, policy: str | None = None) -> None:
        """Add to the attempt's reward; with `turn`, to that turn's. Where several policies are trained it counts for
        all that speak, with `turn` for the turn's, with `policy` for that one. Raises `ValueError` for what is no
        finite number, and for an unknown policy."""
        number = finite(value)
        if name := self._sampler.named(policy) if policy is not None else turn.policy if turn is not None else "":
            self.policy_rewards[name] += number
        else:
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


class Environment(Protocol):
    """An environment; made once in each environment actor, and on the driver for its tasks. Optional are these async
    methods:

    - `score_group(task, attempts)` returns a reward for each attempt of a group, instead of its own: for comparisons.
      Where several policies are trained, a number is that of all, and a mapping has those of some by name.
    - `setup(task, ctx)` makes what an attempt needs of its own before `run`, such as a container, which may be kept in
      `ctx.surroundings`. What it raises is an `InfrastructureError`.
    - `teardown(task, ctx)` gives it back; called after every `setup`, however it and the attempt have ended, for 30 s
      at most. What it raises is counted (`environment/teardown_failed`) and changes nothing.
    - `aclose()` is called at the end.
    """

    def tasks(self, seed: int) -> Iterable[Task]:
        """The tasks in an order that depends on `seed` alone: a list, which is used whole, or a generator, endless or
        not, of which 10,000 are used unless data.size says otherwise. Not needed where `data.source` is a
        dataset: its rows are the tasks then."""

    async def run(self, task: Task, ctx: Context) -> None:
        """Play one attempt. It has ended when this returns; what it raises fails the attempt, which is not trained."""


def environment(name: str) -> Callable[[F], F]:
    """Register a class, or a function that makes one, under a name."""

    def register(make: F) -> F:
        ENVIRONMENTS[name] = make
        return make

    return register


def make_environment(config: EnvironmentConfig, imports: Sequence[str] = ()) -> Any:
    """Make the environment that `environment.name` names, with its options. `imports`: files that register some. Raises
    `ConfigError`."""
    name = str(config.name)
    for path in imports:
        import_file(path, "imports")
    if ":" in name:
        make = find_function(name, "environment.name")
    else:
        if name not in ENVIRONMENTS and name in BUILTIN:
            _import_adapter(name)
        if name not in ENVIRONMENTS:
            raise ConfigError(
                f"environment.name={name}: no environment is registered under this name"
                f"{suggest(name, {*ENVIRONMENTS, *BUILTIN})} One of your own is `file.py:Class` or "
                "`package.module:Class`."
            )
        make = ENVIRONMENTS[name]
    try:
        made = make(**reveal(config.options))
    except TypeError as error:
        raise ConfigError(f"environment.options: {name} cannot be made with them: {error}.") from error
    if not callable(getattr(made, "run", None)):
        raise ConfigError(f"environment.name={name}: it has no method run(task, ctx).")
    return made


def _import_adapter(name: str) -> None:
    try:
        importlib.import_module(BUILTIN[name])
    except ImportError as error:
        raise ConfigError(
            f"environment.name={name}: it needs a package that is not installed: {error}. Install it with "
            f"`pip install {error.name or name}`."
        ) from error
