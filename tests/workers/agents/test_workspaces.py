"""An attempt whose policy writes commands: they run in a workspace, and a check of what it changed is its reward."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.agents.environment import Context, Task
from penstock.workers.agents.trajectory import COMPLETED, FAILED, TRUNCATED
from penstock.workers.protocols import Sampling
from penstock.workers.sandbox.disk import base_on
from tests.workers.agents.played import TASK, ScriptedEngines, make_runner

pytestmark = pytest.mark.real
CHECK = "python3 -c 'import sums; print(sums.add(2, 3))'"


class Repairs:
    """Runs what the policy says until it says "done"."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.opened = tree, list[Any]()

    async def run(self, task: Task, ctx: Context) -> None:
        async with ctx.workspace(self.tree) as ws:
            self.opened.append(ws)
            shell = ws.shell()
            messages: list[Any] = [{"role": "user", "content": "repair"}]
            while (turn := await ctx.sample(messages)).answer.strip() != "done":
                outcome = await shell.run(turn.answer)
                messages += [turn.message, {"role": "user", "content": f"{outcome.exit_code}"}]
            checked = await ws.check(CHECK)
            ctx.reward(float(checked.stdout == "5\n"))


class Reads:
    """Reads what the policy should have written."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    async def run(self, task: Task, ctx: Context) -> None:
        async with ctx.workspace(self.tree) as ws:
            turn = await ctx.sample([{"role": "user", "content": "write"}])
            await ws.run(turn.answer)
            ctx.reward(float(await ws.read("written") == b"5\n"))


def test_what_a_policy_has_not_written_fails_its_attempt_and_not_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        runner = make_runner(Reads(tmp_path), ScriptedEngines(answers("true", "echo 5 > written")))
        attempt = await runner.attempt(TASK, Sampling(max_tokens=40, seed=5))
        assert (attempt.outcome.kind, attempt.outcome.reason) == (FAILED, "environment_error")
        assert "WorkspaceError: workspace: read written" in attempt.outcome.detail
        attempt = await runner.attempt(TASK, Sampling(max_tokens=40, seed=5))
        assert (attempt.outcome.kind, attempt.reward) == (COMPLETED, 1.0)
        await runner.close()

    asyncio.run(main())


def answers(*commands: str) -> Any:
    left = iter(commands)
    return lambda prompt, sampling: next(left)


def test_a_policy_repairs_a_tree_and_is_rewarded_by_a_check(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a - b\n")

    async def main() -> None:
        environment = Repairs(tmp_path)
        for commands, reward in (
            (("cd /", "cd workspace; ls", "sed -i s/-/+/ sums.py", "done"), 1.0),
            (("echo no", "done"), 0.0),
        ):
            runner = make_runner(environment, ScriptedEngines(answers(*commands)))
            attempt = await runner.attempt(TASK, Sampling(max_tokens=40, seed=5))
            assert (attempt.outcome.kind, attempt.reward) == (COMPLETED, reward)
            await runner.close()
        engines = ScriptedEngines(answers("sleep 600", "done"))
        runner = make_runner(environment, engines, timeout_s=0.5)
        attempt = await runner.attempt(TASK, Sampling(max_tokens=40, seed=5))
        assert attempt.outcome.kind == TRUNCATED
        await runner.close()
        assert [ws.worker.process.returncode is not None for ws in environment.opened] == [True] * 3

    asyncio.run(main())
    assert (tmp_path / "sums.py").read_text() == "def add(a, b):\n    return a - b\n"


@pytest.mark.parametrize("named", ["by the configuration", "by the environment"])
def test_what_is_changed_lies_on_the_disk_that_is_named(tmp_path: Path, named: str) -> None:
    tree, disk, other = tmp_path / "tree", tmp_path / "disk", tmp_path / "other"
    for place in (tree, disk, other):
        place.mkdir()

    class Writes:
        async def run(self, task: Task, ctx: Context) -> None:
            options: Any = {"disk": disk} if named == "by the environment" else {}
            async with ctx.workspace(tree, **options) as ws:
                await ws.run((await ctx.sample([{"role": "user", "content": "write"}])).answer)
                ctx.reward(float(len(os.listdir(base_on(disk))) > 0 and not base_on(other).exists()))

    async def main() -> None:
        default = disk if named == "by the configuration" else other
        runner = make_runner(Writes(), ScriptedEngines(answers("touch x")), workspace_disk=str(default))
        attempt = await runner.attempt(TASK, Sampling(max_tokens=40, seed=5))
        assert (attempt.outcome.kind, attempt.reward) == (COMPLETED, 1.0), attempt.outcome
        await runner.close()

    asyncio.run(main())
