"""Tasks in repositories, in the columns of SWE-bench and SWE-Gym, without containers.

    archive of a repository at a commit ─▶ workspace ─▶ commands of the policy ─▶ check with the hidden tests ─▶ reward
                                                        or of an agent in the workspace, which asks the policy

A row has `problem_statement`, `test_patch`, `FAIL_TO_PASS` and `PASS_TO_PASS`; its archive is found by the row's other
columns. An environment of your own may begin as a copy of this file.
"""

import json
import re
import shlex
from asyncio import Lock
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from penstock.conf.errors import ConfigError, DataError, suggest
from penstock.workers.agents.adapters.tools import answered
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.sandbox.execution import ProgramOutcome
from penstock.workers.sandbox.workspace import LIMITS, Shell, Workspace, WorkspaceLimits

COMMAND = (
    "python3 -c 'import sys; sys.path = [path for path in sys.path if path]; import pytest; sys.exit(pytest.main())' "
    "-q --tb=no -rp -p no:cacheprovider {files}"
)
"""The tests' command: pytest of any Python, and not a file of this name in the tree."""
SYSTEM = (
    "You work in a repository. Call bash to look around, to change files and to run programs. When the problem is "
    "solved, answer without a call."
)
PATCHED = re.compile(r"^(?:diff --git a/(.+) b/\1|(?:(?:---|\+\+\+) [ab]/|rename (?:from|to) )(.+?)\t?)$", re.MULTILINE)
PASSED = re.compile(r"^PASSED (.+)$", re.MULTILINE)
PATCH = "/tmp/tests.patch"
AGENT_S, COMMAND_S, TESTS_S = 1800.0, 60.0, 300.0
"""Seconds of an agent, of a command of the policy's, and of the tests, if nothing else is asked for."""
MAX_ROUNDS = 10_000
"""Largest number of calls of bash; environment.max_turns ends them earlier."""
AGENT = "environment.options.agent"


@environment("repository")
class Repository:
    """Tasks in repositories; they are rows of a dataset.

    environment:
      name: repository
      options: {archive: "trees/{instance_id}.tar.gz", show: [/opt/env], variables: {PATH: "/opt/env/bin:/bin"}}
    data: {path: tasks.jsonl, columns: {prompt: problem_statement}}
    """

    def __init__(
        self,
        archive: str,
        at: str = "/testbed",
        root: bool = False,
        show: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        command: str = COMMAND,
        agent: str | None = None,
        timeouts_s: Sequence[float] | None = None,
    ) -> None:
        """`archive`: path of a task's archive, directory, or image in the OCI's layout. `at`, `root`, `show`,
        `variables`: of `ctx.workspace`; `show` names what the tests need and the archive has not, such as an
        environment with pytest. `archive`, `show` and `variables` may have the row's columns in braces. `command`: runs
        test files, and prints a line `PASSED ID` for each test that passes. `agent`: command of `sh` that works in
        place of the tool bash, with the row's columns in braces, quoted. `timeouts_s`: of a command of the policy's or
        of the whole agent, and of the tests; keep their sum well below `environment.timeout_s`, at which an attempt
        whose tests run is dropped. Raises `ConfigError`."""
        if "{files}" not in command:
            raise ConfigError(f"environment.options.command={command}: it has no {{files}}, where the test files go.")
        timeouts_s = timeouts_s or (AGENT_S if agent else COMMAND_S, TESTS_S)
        if len(timeouts_s) != 2 or min(timeouts_s) <= 0:
            raise ConfigError(f"environment.options.timeouts_s={list(timeouts_s)}: it is two positive numbers.")
        self._archive, self._show, self._variables, self._command = archive, show, dict(variables or {}), command
        self._solver, self._test_s = Solver(agent, timeouts_s[0]), timeouts_s[1]
        self._options: dict[str, Any] = {"at": at, "root": root, "limits": limits_of(timeouts_s)}
        self._trials = Trials()
        self._tests: dict[tuple[str, str], dict[str, bytes | None]] = {}
        """Files of test patches, by archive and patch: rows of two datasets may have the same task id."""

    async def run(self, task: Task, ctx: Context) -> None:
        archive = filled("environment.options.archive", self._archive, task.data, task)
        show = [filled("environment.options.show", str(path), task.data, task) for path in self._show]
        variables = {
            name: filled(f"environment.options.variables.{name}", value, task.data, task)
            for name, value in self._variables.items()
        }
        opened = partial(ctx.workspace, archive, show=show, variables=variables, **self._options)
        key, required = (archive, _column(task, "test_patch")), required_tests(task)
        await self._trials.passed(key, task, lambda: self._fault(task, opened, key, required))
        async with opened() as ws:
            await self._solver.solve(ws, _column(task, "problem_statement"), task, ctx)
            outcome = await ctx.scored(self._checked(ws, key, required))
        ctx.reward(float(required <= passed(outcome)))

    async def _checked(self, ws: Workspace, key: tuple[str, str], required: set[str]) -> ProgramOutcome:
        files = shlex.join(dict.fromkeys(test.partition("::")[0] for test in required))
        return await ws.check(self._command.format(files=files), self._tests[key], self._test_s)

    async def _fault(self, task: Task, opened: Callable[[], Any], key: tuple[str, str], required: set[str]) -> str:
        """Read the tests; return what is wrong with a row whose own `patch` does not pass them here."""
        async with opened() as clean:
            self._tests[key] = await patched(clean, task)
        if not task.data.get("patch"):
            return ""
        async with opened() as ws:
            await applied(ws, task, "patch")
            outcome = await self._checked(ws, key, required)
        missing = sorted(required - passed(outcome))
        if not missing:
            return ""
        return (
            f"{len(missing)} of its {len(required)} tests do not pass here with its own patch, so no policy is right: "
            f"{', '.join(missing)[:300]}. Does environment.options.show have all that they need? "
            f"{output_of(outcome)[-800:]}"
        )


class Trials:
    """Trials of tasks, one of each: whether what their authors say is right, is right here.

    await trials.passed(key, task, trial)   # before each attempt
    """

    def __init__(self) -> None:
        self._locks: defaultdict[Hashable, Lock] = defaultdict(Lock)
        self._faults: dict[Hashable, str] = {}

    async def passed(self, key: Hashable, task: Task, trial: Callable[[], Awaitable[str]]) -> None:
        """Make the trial, unless it was made. Raises `DataError` with the fault that it has found."""
        async with self._locks[key]:
            if key not in self._faults:
                self._faults[key] = await trial()
        if fault := self._faults[key]:
            raise DataError(f"task {task.id}: {fault}")


@dataclass(frozen=True)
class Solver:
    """What works at a problem in a workspace: the policy by calls of bash, or an agent that asks the policy."""

    agent: str | None
    timeout_s: float

    async def solve(self, ws: Workspace, problem: str, task: Task, ctx: Context) -> None:
        """Work until the policy calls nothing, or the agent ends; whatever it leaves is to be judged. Raises
        `DataError`, and `RuntimeError` for an agent that ends without having asked the policy."""
        if self.agent is None:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]
            await answered(ctx, messages, [bash_of(ws.shell(), self.timeout_s)], MAX_ROUNDS)
            return
        quoted = {name: shlex.quote(str(value)) for name, value in task.data.items()}
        command = filled(AGENT, self.agent, quoted, task)
        outcome = await ws.run(command, self.timeout_s, reach=ctx.base_url, variables=inside(ctx))
        if not outcome.is_success:
            ctx.count("agents_failed")
            if not ctx.turns:
                raise RuntimeError(f"{AGENT} has not asked the policy: {output_of(outcome)[-1000:]}")


def inside(ctx: Context) -> dict[str, str]:
    """Environment variables of `ctx.describe`, with the address at which a command in a workspace reaches it."""
    address = urlsplit(ctx.base_url)
    here = f"127.0.0.1:{address.port}"
    return {name: value.replace(address.netloc, here) for name, value in ctx.describe().items()}


def limits_of(timeouts_s: Sequence[float]) -> WorkspaceLimits:
    """The limits of workspaces, with time for the longest command."""
    return replace(LIMITS, wall_s=max(LIMITS.wall_s, *timeouts_s), cpu_s=max(LIMITS.cpu_s, *timeouts_s))


def filled(key: str, template: str, columns: Mapping[str, Any], task: Task) -> str:
    """A key's value with a row's columns in its braces. Raises `DataError`, `ConfigError`."""
    try:
        return template.format(**columns)
    except KeyError as error:
        raise DataError(
            f"{key}={template}: task {task.id} has no column {error}{suggest(str(error.args[0]), columns)}"
        ) from None
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{key}={template}: {error}. Write braces that mean themselves twice.") from None


def bash_of(shell: Shell, timeout_s: float) -> Any:
    """The tool of the policy."""

    async def bash(command: str) -> str:
        """Run a command in the repository. The directory and variables stay for the next command."""
        return output_of(await shell.run(command, timeout_s))

    return bash


def output_of(outcome: ProgramOutcome) -> str:
    """What the policy reads of a command."""
    end = f"exit code {outcome.exit_code}" if outcome.reason == "exited" else f"ended: {outcome.reason}"
    return f"{outcome.stdout}{outcome.stderr}[{end}]"


def required_tests(task: Task) -> set[str]:
    """Names of the tests that have to pass. Raises `DataError`."""
    found: set[str] = set()
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        value = _column(task, name)
        try:
            tests = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            raise DataError(f"task {task.id}: {name} is neither a list nor the JSON of one: {value[:80]!r}") from None
        found.update(map(str, tests))
    if not found:
        raise DataError(f"task {task.id}: FAIL_TO_PASS and PASS_TO_PASS are empty, so every change would be right.")
    return found


async def applied(ws: Workspace, task: Task, column: str) -> None:
    """Apply a patch of the row. Raises `DataError`."""
    await ws.write(PATCH, _column(task, column))
    outcome = await ws.run(f"git apply {PATCH} || patch -p1 -f -s -i {PATCH}")
    if not outcome.is_success:
        raise DataError(
            f"task {task.id}: {column} cannot be applied to its archive: {outcome.stderr.strip()[-300:]}. Is it the "
            "repository at base_commit, without a directory around it?"
        )


async def patched(clean: Workspace, task: Task) -> dict[str, bytes | None]:
    """The files of the test patch as it leaves them; None: removed. `clean`: the original tree."""
    await applied(clean, task, "test_patch")
    files: dict[str, bytes | None] = {}
    for path in paths_of(_column(task, "test_patch")):
        is_there = (await clean.run(f"test -f {shlex.quote(path)}")).is_success
        files[path] = await clean.read(path) if is_there else None
    return files


def passed(outcome: ProgramOutcome) -> set[str]:
    """Names of the tests that have passed."""
    return set(PASSED.findall(outcome.stdout))


def paths_of(patch: str) -> list[str]:
    """Files that a patch names, in its order; empty and binary ones are named in the line of `diff --git` alone."""
    return list(dict.fromkeys(found[1] or found[2] for found in PATCHED.finditer(patch)))


def _column(task: Task, name: str) -> Any:
    if name not in task.data:
        raise DataError(f"task {task.id} has no column {name}{suggest(name, task.data)}")
    return task.data[name]
