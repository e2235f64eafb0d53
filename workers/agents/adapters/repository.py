"""Tasks in repositories, in the columns of SWE-bench and SWE-Gym, without containers.

    archive of a repository at a commit ─▶ workspace ─▶ commands of the policy ─▶ check with the hidden tests ─▶ reward

A row has `problem_statement`, `test_patch`, `FAIL_TO_PASS` and `PASS_TO_PASS`; its archive is found by the row's other
columns. An environment of your own may begin as a copy of this file.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.conf.errors import ConfigError, DataError, suggest
from penstock.workers.agents.adapters.tools import answered
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.sandbox.execution import ProgramOutcome
from penstock.workers.sandbox.workspace import Shell, Workspace

COMMAND = "python3 -P -m pytest -q --tb=no -rp -p no:cacheprovider {files}"
SYSTEM = (
    "You work in a repository. Call bash to look around, to change files and to run programs. When the problem is "
    "solved, answer without a call."
)
PATCHED = re.compile(r"^(?:diff --git a/(.+) b/\1|(?:(?:---|\+\+\+) [ab]/|rename (?:from|to) )(.+?)\t?)$", re.MULTILINE)
PASSED = re.compile(r"^PASSED (.+)$", re.MULTILINE)
PATCH = "/tmp/tests.patch"


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
        show: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        command: str = COMMAND,
        max_rounds: int = 50,
        timeouts_s: Sequence[float] = (60.0, 300.0),
    ) -> None:
        """`archive`: path of a task's archive or directory, with the row's columns in braces. `at`, `show`,
        `variables`: of `ctx.workspace`; `show` names what the tests need and the archive has not, such as an
        environment with pytest. `command`: runs test files, and prints a line `PASSED ID` for each test that passes.
        `max_rounds`: of calls. `timeouts_s`: of a command of the policy's, and of the tests; keep their sum well below
        `environment.timeout_s`, at which an attempt whose tests run is dropped. Raises `ConfigError`."""
        if "{files}" not in command:
            raise ConfigError(f"environment.options.command={command}: it has no {{files}}, where the test files go.")
        if len(timeouts_s) != 2 or min(timeouts_s) <= 0:
            raise ConfigError(f"environment.options.timeouts_s={list(timeouts_s)}: it is two positive numbers.")
        self._archive, self._command, self._max_rounds = archive, command, max_rounds
        self._options: dict[str, Any] = {"at": at, "show": show, "variables": variables}
        self._run_s, self._test_s = timeouts_s
        self._tests: dict[tuple[str, str], dict[str, bytes | None]] = {}
        """Files of test patches, by archive and patch: rows of two datasets may have the same task id."""

    async def run(self, task: Task, ctx: Context) -> None:
        archive, required = self._archive_of(task), required_tests(task)
        async with ctx.workspace(archive, **self._options) as ws:
            problem = _column(task, "problem_statement")
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]
            await answered(ctx, messages, [bash_of(ws.shell(), self._run_s)], self._max_rounds)
            key = archive, _column(task, "test_patch")
            if key not in self._tests:
                async with ctx.workspace(archive, **self._options) as clean:
                    self._tests[key] = await patched(clean, task)
            files = shlex.join(dict.fromkeys(test.partition("::")[0] for test in required))
            checking = ws.check(self._command.format(files=files), self._tests[key], self._test_s)
            outcome = await ctx.scored(checking)
        ctx.reward(float(required <= set(PASSED.findall(outcome.stdout))))

    def _archive_of(self, task: Task) -> str:
        try:
            return self._archive.format(**task.data)
        except KeyError as error:
            raise DataError(
                f"environment.options.archive={self._archive}: task {task.id} has no column {error}"
                f"{suggest(str(error.args[0]), task.data)}"
            ) from None


def bash_of(shell: Shell, timeout_s: float) -> Any:
    """The tool of the policy."""

    async def bash(command: str) -> str:
        """Run a command in the repository. The directory and variables stay for the next command."""
        return told(await shell.run(command, timeout_s))

    return bash


def told(outcome: ProgramOutcome) -> str:
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


async def patched(clean: Workspace, task: Task) -> dict[str, bytes | None]:
    """The files of the test patch as it leaves them; None: removed. `clean`: the original tree."""
    patch = _column(task, "test_patch")
    await clean.write(PATCH, patch)
    outcome = await clean.run(f"git apply {PATCH} || patch -p1 -f -s -i {PATCH}")
    if not outcome.is_success:
        raise DataError(
            f"task {task.id}: test_patch cannot be applied to its archive: {outcome.stderr.strip()[-300:]}. Is it the "
            "repository at base_commit, without a directory around it?"
        )
    files: dict[str, bytes | None] = {}
    for path in paths_of(patch):
        is_there = (await clean.run(f"test -f {shlex.quote(path)}")).is_success
        files[path] = await clean.read(path) if is_there else None
    return files


def paths_of(patch: str) -> list[str]:
    """Files that a patch names, in its order; empty and binary ones are named in the line of `diff --git` alone."""
    return list(dict.fromkeys(found[1] or found[2] for found in PATCHED.finditer(patch)))


def _column(task: Task, name: str) -> Any:
    if name not in task.data:
        raise DataError(f"task {task.id} has no column {name}{suggest(name, task.data)}")
    return task.data[name]
