"""A run is made again by what its manifest says it has chosen, and refused where that is not all."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.main import main
from penstock.conf.errors import ConfigError
from penstock.orchestrator import reproduce as reproducing
from penstock.orchestrator.configuration.compose import load_config, restore_config
from penstock.orchestrator.reproduce import Comparison, again_config, reproduce
from penstock.orchestrator.run_directory.json_lines import json_of
from penstock.orchestrator.run_directory.run_directory import LOADER, RunDirectory, to_yaml
from penstock.workers.user_code import packaged_recipes

THREADS = {"Rollout-0": 1, "Rollout-1": 1, "Trainer-policy-0": 2}


def values_of(*words: str) -> dict[str, Any]:
    return dict(yaml.load(to_yaml(load_config(words)), LOADER))


def run_at(path: Path, *words: str, tokens: str = "aab", dataflow: list[str] | None = None, **chosen: Any) -> Path:
    """A run with a manifest, and as many steps as there are hashes of tokens."""
    path.mkdir()
    config = values_of("recipe=arithmetic", *words)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    stages = ["prompts", "rollout", "reward", "compute_advantage", "train"] if dataflow is None else dataflow
    manifest = {"config": config, "chosen": {"threads": THREADS, "dataflow": stages} | chosen}
    (path / "manifest.json").write_text(json_of(manifest))
    lines = [{"step": number, "hash/tokens": one} for number, one in enumerate(tokens, 1)]
    (path / "metrics.jsonl").write_text("".join(f"{json_of(line)}\n" for line in lines))
    return path


@pytest.fixture
def stages() -> list[str]:
    return [stage.name for stage in reproducing.dataflow_of(load_config(["recipe=arithmetic"]), None).stages]


def config_again(path: Path) -> Any:
    return again_config(reproducing.read_manifest(path), RunDirectory.open(path), None)


@pytest.mark.parametrize("recipe", sorted(packaged_recipes()))
def test_the_configuration_of_every_recipe_comes_back_as_it_was_written(recipe: str) -> None:
    written = values_of(f"recipe={recipe}")
    assert yaml.load(to_yaml(restore_config(written)), LOADER) == written


def test_a_configuration_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="another version of Penstock"):
        restore_config(values_of("recipe=arithmetic") | {"no_such_key": 1})


def test_what_a_run_has_chosen_is_given_and_nothing_is_planned(tmp_path: Path, stages: list[str]) -> None:
    run = run_at(
        tmp_path / "sums",
        "rollout.num_workers=auto",
        "rollout.num_gpus_per_worker=0",
        "cluster.cpus_per_worker=1",
        dataflow=stages,
    )
    (run / "warm_start" / "model").mkdir(parents=True)
    config = config_again(run)
    assert (config.rollout.num_threads, config.trainer.num_threads, config.rollout.num_workers) == (1, 2, 2)
    assert (config.plan, config.resume, config.tracking.sinks) == ("never", "never", [])
    assert config.model.path == str(run / "warm_start" / "model")
    assert config.trainer.max_steps == load_config(["recipe=arithmetic"]).trainer.max_steps  # a schedule depends on it
    assert config.output_dir == str(tmp_path)
    assert config.name.startswith("sums-again-")
    elsewhere = again_config(reproducing.read_manifest(run), RunDirectory.open(run, "memory://runs/sums"), None)
    assert elsewhere.output_dir == str(Path("runs").resolve())  # what was read is a copy that is removed


def test_threads_that_differ_between_ranks_follow_from_cores_again(tmp_path: Path, stages: list[str]) -> None:
    threads = THREADS | {"Rollout-1": 2, "Scorer-reference-0": 1}
    config = config_again(run_at(tmp_path / "sums", dataflow=stages, threads=threads))
    assert (config.rollout.num_threads, config.trainer.num_threads) == (0, 0)


def test_what_no_file_has_is_refused_with_what_to_do_instead(tmp_path: Path, stages: list[str]) -> None:
    own = run_at(tmp_path / "own", dataflow=["mine"])
    with pytest.raises(ConfigError, match="dataflow was given in Python"):
        config_again(own)
    given = run_at(tmp_path / "given", "name=exact, given to penstock.train", dataflow=stages)
    with pytest.raises(ConfigError, match=r"functions or rows in Python.*penstock diff"):
        config_again(given)
    (own / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"no manifest\.json"):
        reproduce(str(own), print)
    with pytest.raises(ConfigError, match="--steps 0"):
        reproduce(str(own), print, steps=0)


def test_a_comparison_ends_the_run_after_a_difference_or_the_last_step() -> None:
    told: list[str] = []
    before = {step: {"step": step, "hash/tokens": "a"} for step in (1, 2, 3)}
    for last, lines, same, is_over in ((3, "aa", 2, False), (2, "aa", 2, True), (3, "ab", 1, True)):
        comparison = Comparison(before, last, told.append)
        comparison.log(0, {"accuracy/heldout": 0.5})
        for step, one in enumerate(lines, 1):
            comparison.log(step, {"hash/tokens": one})
        assert (comparison.same, comparison.is_over) == (same, is_over)
    assert told[-2:] == ["step 1: the same bits", "step 2: other tokens"]


def test_diff_says_the_step_and_ends_with_one_where_bits_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, same = run_at(tmp_path / "first"), run_at(tmp_path / "same", tokens="aa")
    other = run_at(tmp_path / "other", "max_staleness=1", "rollout.engine=vllm", tokens="abb")
    assert main(["diff", str(first), str(same)]) == 0
    assert capsys.readouterr().out.splitlines() == ["the same bits up to step 2", "their manifests are the same"]
    assert main(["diff", str(other), str(first)]) == 1
    told = capsys.readouterr().out
    assert told.startswith("the same bits up to step 1; step 2 is the first that differs, in its tokens.")
    assert "config.max_staleness: 1 | 0" in told
    assert told.count("such a difference is expected: ") == 2
    assert main(["diff", str(first), str(tmp_path)]) == 2


def test_what_is_said_of_a_run_made_again_is_the_verdict_and_its_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: list[str]
) -> None:
    before = run_at(tmp_path / "before", "max_staleness=1", dataflow=stages)
    after = run_at(tmp_path / "after", dataflow=stages)

    def made(config: Any, sinks: Any) -> Any:
        for step, one in enumerate("aac", 1):
            if not sinks[0].is_over:
                sinks[0].log(step, {"hash/tokens": one})
        return type("Result", (), {"directory": after})

    monkeypatch.setattr(reproducing, "run", made)
    told: list[str] = []
    assert reproduce(str(before), told.append, steps=2) == 0
    assert "max_staleness=1: which version samples a token depends on timing" in told[0]
    assert reproduce(str(before), told.append) == 1
    assert told[-1].startswith("such a difference is expected: max_staleness=1")
