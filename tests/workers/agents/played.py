"""A runner over an engine that answers from a script, with a character tokenizer: whole attempts without processes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from penstock.conf.environment import EnvironmentConfig
from penstock.conf.model import FreshModelConfig
from penstock.metering.meters import Meters
from penstock.workers.agents.attempts import AttemptRunner
from penstock.workers.agents.environment import Task
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.gateway.http_server import AttemptKeys
from penstock.workers.agents.gateway.turn_sampler import TurnLimits, TurnSampler
from penstock.workers.agents.trajectory import Trajectory
from penstock.workers.fresh_model import EOS_ID, character_tokenizer
from penstock.workers.protocols import Completion, Sampling

Script = Callable[[str, Sampling], str]
"""What is answered to a prompt."""
TASK = Task("0", 0, {})


@cache
def tokenizer() -> Any:
    return character_tokenizer(FreshModelConfig())


class ScriptedEngines:
    """Answers as `script` says, and ends its answers unless they are cut."""

    def __init__(self, script: Script, version: int = 0) -> None:
        self.script, self.version = script, version
        self.asked: list[tuple[str, Sampling]] = []

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, conversation: object) -> Completion:
        await asyncio.sleep(0)
        prompt = tokenizer().decode(prompt_ids)
        self.asked.append((prompt, sampling))
        text = self.script(prompt, sampling)
        ids = [*tokenizer()(text)["input_ids"], EOS_ID]
        finish = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        return Completion(ids, [-0.5] * len(ids), [self.version] * len(ids), text, finish)


def make_runner(
    environment: Any,
    engines: ScriptedEngines,
    *,
    max_model_len: int = 200,
    keys: AttemptKeys | None = None,
    meters: Meters | None = None,
    tools: str = "pythonic",
    policies: Sequence[str] = (),
    **settings: Any,
) -> AttemptRunner:
    """`policies`: those that are trained, of which the first answers where none is named."""
    config = EnvironmentConfig(**{"timeout_s": 30.0, "max_turns": 8, **settings})
    form = TemplateFormat(tokenizer(), tools)
    limits = TurnLimits(config.max_turns, config.max_tokens, max_model_len)
    counts: Counter[str] = Counter()

    def make_sampler(sampling: Sampling) -> TurnSampler:
        sampling = replace(sampling, policy=policies[0] if len(policies) > 1 else "")
        return TurnSampler(engines, form, sampling, limits, counts=counts, policies=policies)

    return AttemptRunner(environment, config, make_sampler, keys or AttemptKeys(), counts=counts, meters=meters)


def play(
    environment: Any, script: Script, *, sampling: Sampling | None = None, task: Task = TASK, **settings: Any
) -> tuple[Trajectory, Counter[str]]:
    """One attempt, and what was counted."""
    runner = make_runner(environment, ScriptedEngines(script), **settings)
    attempt = asyncio.run(runner.attempt(task, sampling or Sampling(max_tokens=40, seed=5)))
    return attempt, runner.counts


class Played:
    """An environment of one function."""

    def __init__(self, run: Any) -> None:
        self._run = run

    async def run(self, task: Task, ctx: Any) -> None:
        await self._run(ctx)
