"""An environment whose policy writes files in workspaces, with processes that outlive their commands."""

from collections.abc import Iterator

from penstock import Context, Task

COUNT = "python3 -BSE -c \"text = open('answer').read(); print(sum(map(str.isdigit, text)) / max(1, len(text)))\""


class Commands:
    """Two turns, each in a command; a check in a clean fork of a fork says what share of them are digits."""

    def __init__(self, tree: str, sleep: str) -> None:
        """`sleep`: seconds that no other process sleeps, by which these are known."""
        self.tree, self.sleep = tree, sleep

    def tasks(self, seed: int) -> Iterator[Task]:
        return (Task(str(index), index, {"number": seed + index * index}) for index in range(64))

    async def run(self, task: Task, ctx: Context) -> None:
        messages = [{"role": "user", "content": f"{task.data['number']} is a number"}]
        async with ctx.workspace(self.tree) as ws:
            shell = ws.shell()
            for _ in range(2):
                turn = await ctx.sample(messages)
                outcome = await shell.run(
                    f"cat >> answer; sleep {self.sleep} & setsid sleep {self.sleep} &", 60.0, turn.answer
                )
                messages += [turn.message, {"role": "user", "content": f"{outcome.exit_code}"}]
            async with await ws.fork() as fork:
                counted = await fork.check(COUNT)
        ctx.reward(float(counted.stdout))
