"""Engines of vLLM that are wrong in one way are named, with the cause, by the warning of an asynchronous run
(`max_staleness=2`). Engine, actor, trainer, publications, probe and diagnosis are a run's; store and cluster are left out.
"""

import asyncio
import re
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.orchestrator.control.engine_probe import EngineProbe
from penstock.orchestrator.observability.diagnosis import Finding, History, findings
from penstock.store.data.rows import Rows
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import Completion, EngineSpec, Sampling
from penstock.workers.rollout import rollout_actor
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.rollout.rollout_actor import Rollout, RolloutSpec
from penstock.workers.rollout.rollout_worker import response_columns
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.probe import ProbeRecorder
from penstock.workers.trainer.step_report import StepReport, TrainedRows
from tests.publications import write_publication
from tests.workers.trainer.conftest import copy_of_weights

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
NAME, MAX_STALENESS, NUM_STEPS = "Rollout-0", 2, 16
NUM_GROUPS, GROUP = 6, 4
PROMPTS = [[20 + (5 * group + place) % 60 for place in range(40)] for group in range(NUM_GROUPS)]
"""Longer than a block of the cache, so that a group's prompt can be found there."""
TOKENS = 40
LAYER = "model.layers.0.mlp.down_proj.weight"
LR = 1e-3


class WrongEngine(VllmEngine):
    """Wrong in the way that `wrong` names; right where it is empty."""

    wrong = ""
    factor = 1.01

    async def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, *pictures: Any
    ) -> list[Completion]:
        if self.wrong == "temperature":
            sampling = replace(sampling, temperature=self.factor * sampling.temperature)
        completions = await super().generate(prompt_ids, num_samples, sampling, *pictures)
        return [twice(one) for one in completions] if self.wrong == "doubled" else completions

    async def _pause(self, delivery: Any) -> None:
        if self.wrong == "cache":
            self._paused.enter()
            await self._phase(delivery, "pause", self.llm.pause_generation(mode="keep", clear_cache=False))
        else:
            await super()._pause(delivery)


def twice(one: Completion) -> Completion:
    """The completion with its last token appended once more."""
    ids, logprobs, versions = one.token_ids, one.logprobs, one.versions
    return replace(one, token_ids=ids + ids[-1:], logprobs=logprobs + logprobs[-1:], versions=versions + versions[-1:])


class Run:
    """An asynchronous run with one engine; batches are trained two versions after they were begun."""

    def __init__(self, engine: WrongEngine, actor: Rollout, model_path: str, root: Path, temperature: float) -> None:
        self._engine, self._actor, self._root = engine, actor, root
        self._sampling = Sampling(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
        config = TrainerConfig(optimizer=OptimizerConfig(lr=LR, warmup_steps=0))
        self.trainer = PolicyTrainer(config, model_path, temperature=temperature)
        self._temperature = temperature
        handle = SimpleNamespace(probe=SimpleNamespace(remote=actor.probe))
        fleet: Any = SimpleNamespace(role=lambda role: [(NAME, handle)])
        self._weights: Any = SimpleNamespace(serving={})
        self._probe = EngineProbe(fleet, self._weights, engine._config.max_model_len)
        self._before: dict[str, torch.Tensor] = {}
        dtype = engine._config.dtype
        both = {"rollout": RolloutConfig(dtype=dtype), "trainer": TrainerConfig(dtype=dtype)}
        self._limits = RunConfig(max_staleness=MAX_STALENESS, **both).diagnosis_of_run
        self.history = History(self._limits.window)
        self.lines: list[dict[str, float]] = []

    async def steps(self, wrong: str) -> dict[str, Finding]:
        """What the run reports of itself."""
        await self._load(0, "")
        batches = [await self._batch(seed) for seed in range(MAX_STALENESS)]
        self._engine.wrong = wrong
        told: dict[str, Finding] = {}
        for step in range(1, NUM_STEPS + 1):
            report = self._train(step, batches.pop(0))
            sampling = asyncio.create_task(self._batch(100 * step))
            await self._until_under_way(sampling)
            metrics = report.metrics | await self._probe.compare([report])
            await self._load(step, wrong)
            batches.append(await sampling)
            self.history.add(metrics)
            self.lines.append(metrics)
            told |= {one.rule: one for one in findings(self.history, self._limits, MAX_STALENESS)}
        self._engine.wrong = ""
        return told

    async def _until_under_way(self, sampling: asyncio.Task[Rows]) -> None:
        while not sampling.done() and self._engine.sampled().tokens_in_flight < NUM_GROUPS * GROUP * TOKENS // 4:
            await asyncio.sleep(0.001)

    async def _batch(self, seed: int) -> Rows:
        samplings = [self._sampling.seeded(seed + GROUP * group) for group in range(NUM_GROUPS)]
        groups = await self._actor.generate(PROMPTS, GROUP, samplings)
        columns = response_columns([one for group in groups for one in group])
        del columns["response_text"], columns["finish_reason"]
        advantages = [1.0 if index % GROUP < 2 else -1.0 for index in range(NUM_GROUPS * GROUP)]
        prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
        ids = [group for group in range(NUM_GROUPS) for _ in range(GROUP)]
        return Rows.from_lists({"prompt_ids": prompts, "advantage": advantages, **columns}, group_ids=ids)

    def _train(self, step: int, rows: Rows) -> StepReport:
        recorder = ProbeRecorder(rows, temperature=self._temperature)
        report = self.trainer.update(rows, ppo_clip_loss, recorder, step - 1)
        trained = TrainedRows.of(rows, step - 1)
        return StepReport(step, step - 1, report.metrics, trained, 0, 0, {}, rows.row_ids, probe=recorder.rows(rows))

    async def _load(self, version: int, wrong: str) -> None:
        weights = copy_of_weights(self.trainer)
        sent = weights | ({LAYER: self._before[LAYER]} if wrong == "layer" else {})
        self._before = weights
        publication = write_publication(self._root, version, sent.items(), self._engine._config.dtype)
        await self._actor.load(publication)
        self._weights.serving[NAME] = version


class Served:
    """An engine and its actor on a loop of their own, for one run after the other."""

    def __init__(self, model_path: str, root: Path, dtype: str) -> None:
        self._model_path, self._root, self._num_runs = model_path, root, 0
        most = NUM_GROUPS * GROUP
        config = RolloutConfig(max_model_len=96, kv_cache_gib=0.1, max_concurrent_samples=most, dtype=dtype)
        spec = EngineSpec(config, model_path, is_probed=True)
        self.engine = WrongEngine(spec)
        with patch.object(rollout_actor, "make_engine", lambda *_, **__: self.engine):
            self.actor = Rollout(RolloutSpec(NAME, spec, 0, GROUP, pulls=False))
        self._loop = asyncio.new_event_loop()
        self.call(self.engine.start())

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def run(self, wrong: str, temperature: float = 1.0) -> tuple[dict[str, Finding], Run]:
        self._num_runs += 1
        run = Run(self.engine, self.actor, self._model_path, self._root / str(self._num_runs), temperature)
        try:
            return self.call(run.steps(wrong)), run
        finally:
            run.trainer.close()

    def close(self) -> None:
        self.call(self.engine.close())
        self._loop.close()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build_fresh_model(path, FreshModelConfig(hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1), seed=7)
    return str(path)


@pytest.fixture(scope="module")
def exact(model_path: str, warm_spawn: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    served = Served(model_path, tmp_path_factory.mktemp("publications"), "float32")
    yield served
    served.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_right_engine_is_told_nothing(exact: Served, temperature: float) -> None:
    told, run = exact.run("", temperature)
    assert told == {}
    assert sum(f"probe/samples/{NAME}" in line for line in run.lines) >= NUM_STEPS // 4


WRONG = [
    ("temperature", 1.0, "samples as if at 1.01 times the temperature"),
    ("temperature", 0.7, "samples as if at 1.01 times the temperature"),
    ("layer", 1.0, "they agreed at first .*: since then not all that it serves is of the version"),
    ("cache", 1.0, "it has read stale keys and values"),
    ("doubled", 1.0, "repeats the one before it: it was written twice"),
    ("doubled", 0.7, "repeats the one before it: it was written twice"),
]


@pytest.mark.parametrize(("wrong", "temperature", "words"), WRONG)
def test_a_wrong_engine_is_named_with_the_cause(exact: Served, wrong: str, temperature: float, words: str) -> None:
    told, run = exact.run(wrong, temperature)
    print(wrong, temperature, {n: f.text for n, f in told.items()})
    for p in (
        "probe/scores/",
        "probe/samples/",
        "probe/temperature/",
        "mismatch/logprob_abs_mean",
        "lag/logprob_abs_mean@2",
    ):
        print(p, [f"{line[k]:.3g}" for line in run.lines for k in line if k.startswith(p)])
    assert set(told) == {"mismatch"}
    assert told["mismatch"].text.startswith(NAME)
    assert re.search(words, told["mismatch"].text)
