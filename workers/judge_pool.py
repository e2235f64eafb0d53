"""A judge in the run itself: an engine with a frozen model, in the place of a reward actor's processes.

    responses ─▶ rubric ─▶ messages ─▶ the judge's chat template ─▶ engine ─▶ its answer ─▶ a score

The reward actor gives it to the reward worker in place of a `RewardPool`. It is made for a reward `judge` that names no
url.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.conf.environment import GatewayConfig
from penstock.conf.errors import DataError
from penstock.conf.reward import JudgeConfig
from penstock.conf.secret import reveal
from penstock.workers.agents.gateway.chat_formats import make_format
from penstock.workers.agents.gateway.conversation import ConversationFormat
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.protocols import EngineSpec, RolloutEngine, Sampling
from penstock.workers.reward.judge import Messages, Rubric, VerdictCache
from penstock.workers.reward.reward_result import RewardError, RewardResult, ScoringPool
from penstock.workers.reward.signatures import Caller, with_task
from penstock.workers.rollout.rollout_engines import make_engine
from penstock.workers.runtime.async_tasks import BusyClock, cancel_all


@dataclass(frozen=True)
class JudgeSpec:
    """The specification that a judge is made from. Plain data, so that it can be sent through Ray."""

    model_path: str
    config: JudgeConfig = field(default_factory=JudgeConfig)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the reward function `judge`: rubric, low, high, temperature, max_tokens, structured."""
    num_threads: int = 1
    timeout_s: float = 10.0
    """Limit of one sample, in seconds, waiting included."""
    with_thinking: bool | None = None
    """`reward.with_thinking`."""

    def make(self) -> "JudgePool":
        options = {name: reveal(value) for name, value in self.options.items() if name not in ("url", "key")}
        return JudgePool(self, **options)


class JudgePool(ScoringPool):
    """Lifecycle: `start`, then `score` and `stream` concurrently, then `close`."""

    num_lanes = 2
    """Number of leases at a time: one is written while the next is judged."""

    def __init__(
        self,
        spec: JudgeSpec,
        rubric: str = Rubric.text,
        low: float = Rubric.low,
        high: float = Rubric.high,
        temperature: float = 0.0,
        max_tokens: int = 256,
        structured: bool = True,
    ) -> None:
        self._spec, self._rubric, self._caller = spec, Rubric(rubric, low, high), Caller(spec.with_thinking)
        structure = {"json": self._rubric.schema} if structured else None
        self._sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=0, structure=structure)
        self.verdicts = VerdictCache()
        self._clock = BusyClock()
        self._engine: RolloutEngine | None = None
        self._form: ConversationFormat | None = None

    async def start(self) -> None:
        """Start the engine. Raises `ModelError` for a model that cannot chat, and what its engine raises."""
        spec = self._spec
        self._form = make_format(await asyncio.to_thread(load_tokenizer, spec.model_path), GatewayConfig())
        self._engine = make_engine(EngineSpec(spec.config.rollout, spec.model_path, spec.num_threads))
        await self._engine.start()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    @property
    def busy_s(self) -> float:
        return self._clock.seconds()

    async def stream(self, responses: Sequence[Any], tasks: Sequence[str]) -> AsyncIterator[tuple[int, RewardResult]]:
        """Yield `(index, result)` for each response, as they come. Equal responses to the same task are judged once.
        Raises what the engine fails with for good."""
        alike: dict[tuple[str, str], list[int]] = {}
        for index, (response, task) in enumerate(zip(responses, tasks, strict=True)):
            said = self._caller.read(with_task(response, task)[0], is_own=True)
            alike.setdefault((said, task), []).append(index)
        calls = {asyncio.ensure_future(self._in_time(*item)): indices for item, indices in alike.items()}
        left = set(calls)
        try:
            with self._clock.interval():
                while left:
                    done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                    for call in done:
                        for index in calls[call]:
                            yield index, call.result()
        finally:
            await cancel_all(list(left))

    async def _in_time(self, response: str, task: str) -> RewardResult:
        timeout_s = self._spec.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._judged(self._rubric.messages(response, with_task(response, task)[1]))
        except TimeoutError:
            return RewardError("timeout", f"the judge did not answer within {timeout_s:g} s (reward.timeout_s).")
        except (ValueError, DataError) as error:
            return RewardError.of(error)

    async def _judged(self, messages: Messages) -> float:
        """Ask the judge; return the score. Raises `ValueError` for an answer without a number in the range, `DataError`
        for a response that the judge has no room for."""
        assert self._engine is not None
        assert self._form is not None
        known = self.verdicts[messages]
        if known is None:
            prompt_ids = self._form.prompt_ids(messages, ())
            room = self._spec.config.max_model_len - len(prompt_ids)
            if room < 1:
                raise DataError(
                    f"the judge is asked in {len(prompt_ids)} tokens, which leave no room for an answer in "
                    f"reward.judge.max_model_len={self._spec.config.max_model_len}"
                )
            sampling = replace(self._sampling, max_tokens=min(self._sampling.max_tokens, room))
            (answer,) = await self._engine.generate(prompt_ids, 1, sampling)
            said = self._form.read(answer.token_ids, (), prompt_ids).message
            known = self.verdicts[messages] = self._rubric.score(str(said["content"]))
        return known
