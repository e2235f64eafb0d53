"""The interface of environments, and how one is found by name.

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

An environment samples from the policy whenever it wants to, in as many conversations as it wants to. It need not know
of tokens, weights or batches. `environment.name` names a registered one, `file.py:Class` or `package.module:Class`, and
`environment.options` are its keyword arguments.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import ConfigError, suggest
from penstock.conf.secret import reveal
from penstock.workers.environments.context import Context
from penstock.workers.environments.task import Task
from penstock.workers.trajectory import Trajectory
from penstock.workers.user_code import find_function, import_file

F = TypeVar("F", bound=Callable[..., Any])
BUILTIN = {
    name: f"penstock.workers.environments.adapters.{name}"
    for name in ("agent", "gymnasium", "textarena", "reasoning_gym", "verifiers", "tools", "mcp", "openenv")
}
"""Modules that register environments, by the environment's name."""
ENVIRONMENTS: dict[str, Callable[..., Any]] = {}


class Environment(Protocol):
    """An environment; made once in each environment actor, and on the driver for its tasks. Optional: `score_group` and
    `setup`, below; and `aclose()`, an async method called at the end."""

    def tasks(self, seed: int) -> Iterable[Task]:
        """The tasks in an order that depends on `seed` alone: a list, which is used whole, or a generator, endless or
        not, of which 10,000 are used unless data.size says otherwise. Not needed where `data.source` is a
        dataset: its rows are the tasks then."""

    async def run(self, task: Task, ctx: Context) -> None:
        """Play one attempt. It has ended when this returns; what it raises fails the attempt, which is not trained."""


class ScoresGroups(Protocol):
    async def score_group(self, task: Task, attempts: Sequence[Trajectory]) -> Sequence[float]:
        """Return a reward for each attempt of a group, in the place of its own: for comparisons."""


class HasSurroundings(Protocol):
    """An environment whose attempts need something of their own, such as a container. What is made may be kept in
    `ctx.surroundings`."""

    async def setup(self, task: Task, ctx: Context) -> None:
        """Make what the attempt needs, before `run`. What it raises is an `InfrastructureError`."""

    async def teardown(self, task: Task, ctx: Context) -> None:
        """Give it back; called after every `setup`, however it and the attempt have ended, for 30 s at most. What it
        raises is counted (`environment/teardown_failed`) and changes nothing."""


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
