"""A loop of one's own in an environment: it plays the attempts of a run, and trains on them."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import penstock
from penstock import conf
from penstock.algorithms.advantages import group_advantage
from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.errors import ConfigError, DataError, RewardFailure
from penstock.orchestrator.session import Session
from penstock.workers.fresh_model import build_fresh_model
from tests.orchestrator.runs import reference_loop
from tests.orchestrator.runs.test_environments import different, settings

pytestmark = pytest.mark.real
STEPS = 2
MOODS = """
from penstock.conf.errors import Rejected


class Moody:
    def __init__(self, bad: float = 0.0):
        self.bad = bad

    async def run(self, task, ctx):
        turn = await ctx.sample([{"role": "user", "content": "Say something."}])
        kind = sum(turn.output_ids) % 4
        if kind == 0:
            raise Rejected("dull")
        if kind == 1 or self.bad:
            raise ValueError("the board is gone")
        ctx.reward(float(kind))
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build_fresh_model(path, conf.FreshModelConfig(num_layers=2, hidden_size=64, intermediate_size=128), seed=3)
    return str(path)


def with_advantages(rows: penstock.Rows) -> penstock.Rows:
    advantage = np.zeros(len(rows), np.float32)
    for _, members in rows.groups():
        advantage[members] = group_advantage(torch.from_numpy(rows["reward"][members])).numpy()
    return rows.with_column("advantage", advantage)


def trained(run: Session, loss: Any) -> list[dict[str, float]]:
    assert run.environment is not None
    metrics = []
    for step in range(1, STEPS + 1):
        rows = run.environment.play(run.prompts.next(4), n=4)
        assert run.environment.lost == Counter()
        assert len(rows) == 16
        metrics.append(run.policy.update(with_advantages(rows), loss))
        run.policy.publish()
        run.log(step, metrics[-1])
    return metrics


def test_a_loop_of_attempts_is_the_straight_line_of_a_run(tmp_path: Path, cluster: str, model_path: str) -> None:
    config = settings(model_path, tmp_path, f"trainer.max_steps={STEPS}", "name=own", "environment.num_workers=2")
    threads = torch.get_num_threads()
    try:
        straight = reference_loop.train_in_two_turns(config, model_path)
    finally:
        torch.set_num_threads(threads)
    (train,) = dataflow_of(config).of_kind("train")
    with penstock.session(config) as run:
        with pytest.raises(DataError, match=r"run\.environment\.play"):
            run.policy.generate(run.prompts.next(0), n=4)
        trained(run, train.function)
        with pytest.raises(ConfigError, match="the environment does"):
            run.reward(penstock.Rows.from_lists({"task": ["{}"], "response_text": [""]}, group_ids=[0]))
        run.policy.export(tmp_path / "model")
    assert not different(dict(load_file(tmp_path / "model" / "model.safetensors")), straight)


def moody(model_path: str, directory: Path, word: str) -> penstock.RunConfig:
    """A configuration with an environment that rejects some attempts, and fails at others."""
    (directory / "moods.py").write_text(MOODS)
    lines = [f'{{"question": "{number}?", "answer": "{number}"}}' for number in range(8)]
    (directory / "tasks.jsonl").write_text("\n".join(lines))
    words = [f"environment.name={directory}/moods.py:Moody", "data.source=jsonl", f"data.path={directory}/tasks.jsonl"]
    config: penstock.RunConfig = settings(model_path, directory, *words, word, "rollout.num_workers=1", "name=moody")
    return config


def test_attempts_that_do_not_count_are_counted_by_reason(tmp_path: Path, cluster: str, model_path: str) -> None:
    with penstock.session(moody(model_path, tmp_path, "environment.max_error_share=0.9")) as run:
        assert run.environment is not None
        rows = run.environment.play(run.prompts.next(8), n=4)
        lost = run.environment.lost
        assert set(lost) == {"rejected_dull", "environment_error"}
        assert len(rows) == 32 - lost.total()
        assert set(rows["reward"].tolist()) == {2.0, 3.0}
        assert set(rows.group_ids.tolist()) <= set(range(8))


def test_an_environment_that_fails_always_is_told(tmp_path: Path, cluster: str, model_path: str) -> None:
    with penstock.session(moody(model_path, tmp_path, "environment.options.bad=1")) as run:
        assert run.environment is not None
        with pytest.raises(RewardFailure, match="the board is gone"):
            run.environment.play(run.prompts.next(8), n=4)
