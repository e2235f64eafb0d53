"""Engines of vLLM that are wrong in one way are named, with the cause, by the warning of an asynchronous run
(`max_staleness=2`). Engine, actor, trainer, publications, probe and diagnosis are a run's, without store and cluster.
`pytest -s` prints the table of docs/monitoring.md.
"""

import asyncio
import re
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
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
NAME, MAX_STALENESS, NUM_STEPS = "Rollout-0", 2, 14
NUM_GROUPS, GROUP = 6, 4
PROMPTS = [[20 + (5 * group + place) % 60 for place in range(40)] for group in range(NUM_GROUPS)]
"""Longer than a block of the cache, so that a group's prompt can be found there."""
TOKENS, MAX_LENGTH = 40, 96
LAYER = "model.layers.0."
LR = 1e-3


class WrongEngine(VllmEngine):
    """Wrong in the way that `wrong` names; right where it is empty."""

    wrong, dtype = "", "float32"

    async def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, *pictures: Any
    ) -> list[Completion]:
        if self.wrong == "temperature":
            sampling = replace(sampling, temperature=1.01 * sampling.temperature)
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

    def __init__(self, served: "Served", root: Path, dtype: str, temperature: float) -> None:
        """`dtype`: that the configuration says."""
        self._engine, self._actor, self._root = served.engine, served.actor, root
        self._sampling = Sampling(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
        config = TrainerConfig(dtype=dtype, optimizer=OptimizerConfig(lr=LR, warmup_steps=0))
        self.trainer = PolicyTrainer(config, served.model_path, temperature=temperature)
        self._temperature = temperature
        handle = SimpleNamespace(probe=SimpleNamespace(remote=served.actor.probe))
        fleet: Any = SimpleNamespace(role=lambda role: [(NAME, handle)])
        weights: Any = SimpleNamespace(serving={})
        self._weights, self._probe = weights, EngineProbe(fleet, weights, MAX_LENGTH)
        self._before: dict[str, torch.Tensor] = {}
        run = RunConfig(max_staleness=MAX_STALENESS, rollout=RolloutConfig(dtype=dtype), trainer=config)
        self._limits = run.diagnosis_of_run
        self.history = History(self._limits.window)
        self.lines: list[dict[str, float]] = []

    def values(self, key: str) -> list[float]:
        """Values of a metric in the steps that have it."""
        return [line[key] for line in self.lines if key in line]

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
        recorder: Any = ProbeRecorder(rows, temperature=self._temperature)
        report = self.trainer.update(rows, ppo_clip_loss, recorder, step - 1)
        trained = TrainedRows.of(rows, step - 1)
        return StepReport(step, step - 1, report.metrics, trained, 0, 0, {}, rows.row_ids, probe=recorder.rows(rows))

    async def _load(self, version: int, wrong: str) -> None:
        weights = copy_of_weights(self.trainer)
        old = {name: tensor for name, tensor in self._before.items() if wrong == "layer" and name.startswith(LAYER)}
        sent = weights | old
        self._before = weights
        publication = write_publication(self._root, version, sent.items(), self._engine.dtype)
        await self._actor.load(publication)
        self._weights.serving[NAME] = version


class Served:
    """An engine and its actor on a loop of their own, for one run after the other."""

    def __init__(self, model_path: str, root: Path, dtype: str) -> None:
        self.model_path, self._root, self._num_runs = model_path, root, 0
        most = NUM_GROUPS * GROUP
        config = RolloutConfig(max_model_len=MAX_LENGTH, kv_cache_gib=0.1, max_concurrent_samples=most, dtype=dtype)
        spec = EngineSpec(config, model_path, is_probed=True)
        self.engine = WrongEngine(spec)
        self.engine.dtype = dtype
        with patch.object(rollout_actor, "make_engine", lambda *_, **__: self.engine):
            self.actor = Rollout(RolloutSpec(NAME, spec, 0, GROUP, pulls=False))
        self._loop = asyncio.new_event_loop()
        self.call(self.engine.start())

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def run(self, wrong: str, temperature: float = 1.0, dtype: str = "float32") -> tuple[dict[str, Finding], Run]:
        """What a run with this engine reports of itself, and the run. `dtype`: that its configuration says."""
        self._num_runs += 1
        run = Run(self, self._root / str(self._num_runs), dtype, temperature)
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
    served = Served(model_path, tmp_path_factory.mktemp("publications"), "float32")
    yield served
    served.close()


@pytest.fixture(scope="module")
def rounded(model_path: str, warm_spawn: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(model_path, tmp_path_factory.mktemp("publications"), "bfloat16")
    yield served
    served.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_right_engine_is_told_nothing(exact: Served, temperature: float) -> None:
    told, run = exact.run("", temperature)
    assert told == {}
    for kind in ("scores", "samples"):
        looks = run.values(f"probe/{kind}/{NAME}")
        assert len(looks) >= NUM_STEPS // 4
        assert max(looks) < 1e-5


def test_a_right_engine_in_bfloat16_is_told_nothing(rounded: Served) -> None:
    told, run = rounded.run("", dtype="bfloat16")
    assert told == {}
    assert 1e-4 < max(run.values(f"probe/scores/{NAME}")) < 0.03


@pytest.mark.parametrize(
    ("wrong", "temperature", "words"),
    [
        ("temperature", 1.0, "samples as if at 1.01 times the temperature"),
        ("temperature", 0.7, "samples as if at 1.01 times the temperature"),
        ("layer", 1.0, "they agreed at first .*: since then not all that it serves is of the version"),
        ("cache", 1.0, "it has read stale keys and values"),
        ("doubled", 1.0, "repeats the one before it: it was written twice"),
    ],
)
def test_a_wrong_engine_is_named_with_the_cause(exact: Served, wrong: str, temperature: float, words: str) -> None:
    check_named(exact.run(wrong, temperature), wrong, words)


def test_an_engine_of_another_dtype_is_named(rounded: Served) -> None:
    check_named(rounded.run("", dtype="float32"), "dtype", "from the first look on: another dtype")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("temperature", "samples as if at 1.01 times the temperature"), ("doubled", "it was written twice")],
)
def test_in_bfloat16_what_is_no_rounding_is_named(rounded: Served, wrong: str, words: str) -> None:
    check_named(rounded.run(wrong, dtype="bfloat16"), f"{wrong}, bfloat16", words)


def check_named(result: tuple[dict[str, Finding], Run], wrong: str, words: str) -> None:
    """The engine is named, with the cause."""
    told, run = result
    means = {kind: fmean(run.values(f"probe/{kind}/{NAME}")) for kind in ("scores", "samples")}
    print(f"\n{wrong:22} scores {means['scores']:8.1e}  samples {means['samples']:8.1e}  {told['mismatch'].text}")
    assert set(told) == {"mismatch"}
    assert told["mismatch"].text.startswith(NAME)
    assert re.search(words, told["mismatch"].text), told["mismatch"].text
