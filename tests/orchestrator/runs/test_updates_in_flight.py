"""Whole runs whose answers outlast several versions of the weights, by what becomes of them (`rollout.on_update`)."""

from pathlib import Path

import pytest

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from tests.run_files import metrics_of, sampled_difference, samples_of

pytestmark = pytest.mark.real
WORDS = [
    "max_staleness=2", "trainer.max_steps=8", "trainer.groups_per_step=2", "rollout.max_concurrent_samples=16",
    "rollout.max_model_len=320", "rollout.sampling.max_tokens=256", "rollout.sampling.ignore_eos=true",
    "tracking.samples_every_steps=1", "evaluation.every_steps=0",
]  # fmt: skip


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_what_reads_on_from_old_caches_is_lag_and_raises_no_alarm(
    engine: str, small_run: list[str], tmp_path: Path, cluster: str
) -> None:
    words = [*small_run, *WORDS, f"rollout.engine={engine}", "rollout.on_update=keep", f"output_dir={tmp_path}"]
    result = run(load_config(words), quiet=True)
    lines = metrics_of(result.directory)
    assert all(line["staleness/max"] <= 2 for line in lines)
    assert all(line.get("mismatch/logprob_abs_mean", 0.0) < 1e-4 for line in lines)
    crossing = [
        line["step"]
        for line in lines
        if any({line["step"] - 1} < {*row["token_versions"]} for row in samples_of(result.directory, line["step"]))
    ]
    assert crossing, "no answer outlasted a version"
    assert any(sampled_difference(result.directory, step) > 1e-4 for step in crossing), "by a token's own version alone"
    assert sum(line["rollout/paused_s"] for line in lines) > 0
    assert sum(line["rollout/prefilled_again"] for line in lines) == 0


def test_engines_that_finish_first_make_answers_of_one_version(
    small_run: list[str], tmp_path: Path, cluster: str
) -> None:
    words = [*small_run, *WORDS, "rollout.engine=vllm", "rollout.on_update=finish", "rollout.num_workers=2"]
    result = run(load_config([*words, f"output_dir={tmp_path}"]), quiet=True)
    lines = metrics_of(result.directory)
    assert all(line["staleness/max"] <= 2 for line in lines)
    rows = [row for line in lines for row in samples_of(result.directory, line["step"])]
    assert all(len({*row["token_versions"]}) == 1 for row in rows)
    assert len({row["token_versions"][0] for row in rows}) > 1
    assert sum(line["rollout/prefilled_again"] for line in lines) == 0
