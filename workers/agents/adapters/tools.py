"""Tasks that are solved with tools: the policy calls them until it answers, and its answer is scored.

    sample ─▶ calls? ─▶ make them, answer the model ─▶ sample ─▶ … ─▶ no calls: the answer ─▶ reward

An environment of your own may begin as a copy of this file. `mcp.py` adds the tools of MCP servers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.conf.errors import ConfigError, DataError, suggest
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.agents.gateway.conversation import Message
from penstock.workers.agents.scoring import Scoring
from penstock.workers.agents.toolbox import python
from penstock.workers.agents.trajectory import Turn
from penstock.workers.user_code import find_function

PROMPT = "prompt"
BUILTIN_TOOLS = {"python": python}


@environment("tools")
class Tools:
    """Tasks with tools; they are rows of a dataset.

    environment:
      name: tools
      options: {tools: [python, my_tools.py:look_up], system: "Use the tools.", reward: math_verify}
    data: {path: questions.jsonl}
    """

    def __init__(
        self,
        tools: Sequence[str] = (),
        system: str | None = None,
        prompt: str = PROMPT,
        reward: str | None = "math_verify",
        reward_options: Mapping[str, Any] | None = None,
        max_rounds: int = 16,
    ) -> None:
        """`tools`: `file.py:function`, typed and with a docstring, or python, which runs programs in a sandbox.
        `system`: a first message, for rows without one and without `data.system_prompt`. `prompt`: the column with the
        question, as text or as messages; `prompt` means the row's conversation. `reward`: like `reward.function`, with
        `reward_options`; null: other stages score the row. `max_rounds`: of calls; the model's message after so many is
        its answer. Raises `ConfigError`."""
        if max_rounds < 0:
            raise ConfigError(f"environment.options.max_rounds={max_rounds}: it is at least 0.")
        self.tools = [find_tool(name) for name in tools]
        self._system, self._prompt, self._max_rounds = system, prompt, max_rounds
        self.scoring = Scoring(reward, reward_options) if reward is not None else None

    async def run(self, task: Task, ctx: Context) -> None:
        await self.solve(task, ctx, self.tools)

    async def solve(self, task: Task, ctx: Context, tools: Sequence[Any]) -> None:
        messages = self._opening(task)
        answer = await answered(ctx, messages, tools, self._max_rounds)
        if self.scoring is not None:
            ctx.reward(await ctx.scored(self.scoring.score(answer.answer, task.data)))

    async def aclose(self) -> None:
        if self.scoring is not None:
            await self.scoring.aclose()

    def _opening(self, task: Task) -> list[Message]:
        asked = (task.messages if self._prompt == PROMPT else ()) or task.data.get(self._prompt)
        if not asked:
            raise DataError(
                f"environment.options.prompt={self._prompt}: task {task.id} has no such column"
                f"{suggest(self._prompt, task.data)}"
            )
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        if messages[0]["role"] != "system":
            of_row = [dict(message) for message in task.messages[:1] if message["role"] == "system"]
            own = [{"role": "system", "content": self._system}] if self._system else []
            messages = [*(of_row or own), *messages]
        return messages


async def answered(ctx: Context, messages: Sequence[Message], tools: Sequence[Any], max_rounds: int) -> Turn:
    """The first turn that calls nothing, or the one after `max_rounds` of calls."""
    toolbox = ctx.toolbox(tools)
    turn = await ctx.sample(messages, toolbox)
    for _ in range(max_rounds):
        if not turn.calls and not turn.problem:
            break
        messages = [*messages, turn.message, *await ctx.use_tools(turn, toolbox)]
        turn = await ctx.sample(messages, toolbox)
    return turn


def find_tool(name: str) -> Any:
    if ":" in name:
        return find_function(name, "environment.options.tools")
    if name not in BUILTIN_TOOLS:
        raise ConfigError(
            f"environment.options.tools: there is no tool {name!r}{suggest(name, BUILTIN_TOOLS)} One of your own is "
            "`file.py:function`."
        )
    return BUILTIN_TOOLS[name]
