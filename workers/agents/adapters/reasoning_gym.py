"""Problems of `reasoning_gym` in several attempts: the policy learns that it was wrong, and tries again.

One attempt alone is `data.source=reasoning_gym`, without an environment.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.agents.gateway.conversation import Message
from penstock.workers.agents.scoring import Scoring
from penstock.workers.problems import Problems, make_dataset


@environment("reasoning_gym")
class ReasoningGym:
    """Problems whose reward is the verifier's score of the last answer, times `discount` for each that was wrong before
    it.

    environment:
      name: reasoning_gym
      options: {task: chain_sum, options: {max_digits: 2}, attempts: 3, discount: 0.8}
    data: {source: environment}
    """

    def __init__(
        self,
        task: str,
        options: Mapping[str, Any] | None = None,
        attempts: int = 1,
        feedback: str = "That is wrong. Try again.",
        prompt: str = "{question}",
        discount: float = 1.0,
        size: int = 100_000,
    ) -> None:
        """`options`: the task's own, without seed and size. `attempts`: number at one problem. `feedback`: the message
        after a wrong one; {score} becomes the verifier's score, 0 to 1. `prompt`: {question} becomes the problem.
        `size`: number of different problems of one seed. Raises `ConfigError`."""
        if attempts < 1 or size < 1 or not 0 <= discount <= 1:
            raise ConfigError("environment.options: attempts and size are at least 1, discount is from 0 to 1.")
        if "{question}" not in prompt:
            raise ConfigError(f"environment.options.prompt={prompt!r}: it has no {{question}}, where the problem goes.")
        self._task, self._options, self._size = task, dict(options or {}), size
        self._attempts, self._feedback, self._prompt, self._discount = attempts, feedback, prompt, discount
        self._scoring = Scoring("reasoning_gym")
        make_dataset(task, self._options, ("environment.options.task", "environment.options.options"))

    def tasks(self, seed: int) -> Iterator[Task]:
        problems = Problems(self._task, self._options, seed=seed, size=self._size)
        for index in range(self._size):
            entry = problems.entry(index)
            question = str(entry["question"])
            yield Task(str(index), seed + index, {"question": question, **problems.extra(entry)}, problem=question)

    async def run(self, task: Task, ctx: Context) -> None:
        messages: list[Message] = [
            {"role": "user", "content": self._prompt.replace("{question}", task.data["question"])}
        ]
        for number in range(self._attempts):
            turn = await ctx.sample(messages)
            score = await ctx.scored(self._scoring.score(turn.answer, task.data))
            if score >= 1 or number == self._attempts - 1:
                ctx.reward(score * self._discount**number, turn=turn)
                return
            feedback = self._feedback.replace("{score}", f"{score:.2f}")
            messages += [turn.message, {"role": "user", "content": feedback}]

    async def aclose(self) -> None:
        await self._scoring.aclose()
