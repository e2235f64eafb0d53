"""Whole runs with pictures in their prompts: with `max_staleness=0` they are a straight line bit for bit, also after a
resume and the death of each role; and vLLM sees what the trainer sees while the tower is trained."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.orchestrator.session import session
from penstock.workers.fresh_model import build_fresh_model
from tests.orchestrator.runs import reference_loop
from tests.orchestrator.runs.killing import Killing
from tests.run_files import events_of, metrics_of, samples_of
from tests.vision_models import picture

pytestmark = pytest.mark.real

STEPS = 5
SCREENS = Path(__file__).parent / "screens_game.py"
FRESH = FreshModelConfig(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=1, initializer_range=0.2,
    num_vision_layers=2, vision_hidden_size=32,
)  # fmt: skip
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and prompts with no picture, one, and two of different sizes."""
    place = tmp_path_factory.mktemp("seeing")
    build_fresh_model(place / "model", FRESH, seed=3)
    sizes = {"a.png": (56, 84), "b.png": (28, 56), "c.png": (84, 28)}
    for seed, (name, size) in enumerate(sizes.items()):
        (place / name).write_bytes(picture(*size, seed))
    seen: list[list[str]] = [[], ["a.png"], ["b.png", "c.png"], ["a.png"]]
    rows = [{"question": f"{i} and", "images": seen[i % 4]} for i in range(32)]
    (place / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


def settings(place: Path, directory: Path, *more: str) -> Any:
    return load_config(
        [
            f"model.path={place}/model", f"data.path={place}/prompts.jsonl", "data.columns.answer=null",
            "data.columns.pictures=images", "rollout.max_pictures=2", "reward.function=digits",
            "rollout.engine=hf", "rollout.num_workers=2", "rollout.sampling.max_tokens=12", "rollout.num_threads=1",
            "trainer.num_threads=1", f"trainer.max_steps={STEPS}", "trainer.groups_per_step=4",
            "algorithm.group_size=4", "trainer.optimizer.lr=1e-3", f"output_dir={directory}", "faults.pause_s=0.1",
            *more,
        ]
    )  # fmt: skip


def weights_of(path: Path) -> Weights:
    found: Weights = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).state_dict()
    return found


@pytest.fixture(scope="module")
def straight(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    threads = torch.get_num_threads()
    try:
        return reference_loop.train_seeing(settings(place, tmp_path_factory.mktemp("line")), str(place / "model"))
    finally:
        torch.set_num_threads(threads)


def different(found: Weights, expected: Weights) -> set[str]:
    return {name for name in expected if not torch.equal(found[name], expected[name])}


def test_a_death_of_each_role_leaves_the_straight_line(
    tmp_path: Path, cluster: str, place: Path, straight: Weights
) -> None:
    assert different(weights_of(place / "model"), straight) == {name for name in straight if "visual" not in name}
    deaths = [("Rollout-1", 1), ("Trainer-policy-0", 2), ("Prompts", 3), ("Store", 4)]
    config = settings(place, tmp_path, "name=killed")
    result = run(config, quiet=True, sinks=[Killing(tmp_path / "killed", *death) for death in deaths])
    assert different(weights_of(result.model), straight) == set()
    assert len([event for event in events_of(result.directory) if event["kind"] == "recovered"]) == len(deaths)
    assert all(line["mismatch/logprob_abs_mean"] < 1e-5 for line in metrics_of(result.directory))


def test_a_run_that_goes_on_is_the_run_that_was_never_interrupted(
    tmp_path: Path, cluster: str, place: Path, straight: Weights
) -> None:
    words = ["name=parts", "checkpoint.every_steps=2"]
    run(settings(place, tmp_path, *words, "trainer.max_steps=3"), quiet=True)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "global_step_3")  # as if it was killed before that
    result = run(settings(place, tmp_path, *words, "resume=auto"), quiet=True)
    assert different(weights_of(result.model), straight) == set()


@pytest.mark.promise("What is supported")
def test_vllm_sees_what_the_trainer_sees_while_the_tower_is_trained(tmp_path: Path, cluster: str, place: Path) -> None:
    words = ["rollout.engine=vllm", "rollout.num_workers=1", "rollout.kv_cache_gib=0.25", "rollout.max_model_len=128"]
    words += ["trainer.freeze=[]", "trainer.max_steps=3", "evaluation.every_steps=2", "evaluation.num_problems=8"]
    words += [f"evaluation.path={place}/prompts.jsonl", "evaluation.overlap=allow", "algorithm.kl_coef=0.01"]
    result = run(settings(place, tmp_path, *words, "name=vllm"), quiet=True)
    lines = metrics_of(result.directory)
    steps = [line for line in lines if "mismatch/logprob_abs_mean" in line]
    assert len(steps) == 3
    assert max(line["mismatch/logprob_abs_mean"] for line in steps) < 1e-5
    assert steps[-1]["actor/kl"] > 0
    assert len([line for line in lines if "accuracy/heldout" in line]) == 3
    trained = different(weights_of(result.model), weights_of(place / "model"))
    assert any("visual" in name for name in trained)


def test_vllm_serves_adapters_of_a_model_that_sees(tmp_path: Path, cluster: str, place: Path) -> None:
    words = ["rollout.engine=vllm", "rollout.num_workers=1", "rollout.kv_cache_gib=0.25", "rollout.max_model_len=128"]
    words += ["trainer.lora.rank=4", "trainer.lora.publish=adapter", "trainer.max_steps=3", "name=adapters"]
    lines = metrics_of(run(settings(place, tmp_path, *words), quiet=True).directory)
    assert len(lines) == 3
    assert max(line["mismatch/logprob_abs_mean"] for line in lines) < 1e-5


def test_an_environment_shows_pictures_and_deaths_change_nothing(tmp_path: Path, cluster: str, place: Path) -> None:
    """Two turns: with the pictures of the row, and with another one after the first answer."""
    words = [f"environment.name={SCREENS}:Screens", "rollout.max_pictures=3"]
    words += ["evaluation.every_steps=4", f"evaluation.path={place}/prompts.jsonl", "evaluation.num_problems=8"]
    words += ["evaluation.overlap=allow", "trainer.max_steps=4", "tracking.samples_every_steps=1"]
    undisturbed = run(settings(place, tmp_path, *words, "name=undisturbed"), quiet=True)
    deaths = [("Environment-0", 1), ("Rollout-1", 2), ("Store", 3)]
    sinks = [Killing(tmp_path / "killed", *death) for death in deaths]
    killed = run(settings(place, tmp_path, *words, "name=killed"), quiet=True, sinks=sinks)
    assert len([event for event in events_of(killed.directory) if event["kind"] == "recovered"]) == len(deaths)
    assert different(weights_of(killed.model), weights_of(undisturbed.model)) == set()
    lines = [line for line in metrics_of(killed.directory) if "mismatch/logprob_abs_mean" in line]
    assert all(line["mismatch/logprob_abs_mean"] < 1e-5 for line in lines)
    assert [line["dropped/environment_error"] for line in lines if "dropped/environment_error" in line] == []
    rows = samples_of(undisturbed.directory, 1)
    shown = [row for row in rows if row["pictures"]]
    assert {len(row["pictures"]) for row in rows} <= {1, 2, 3}
    parts = json.loads(shown[0]["transcript"])[-3]["content"]
    assert [part["type"] for part in parts] == ["text", "image", "text"]


def test_a_loop_of_ones_own_sees_too(tmp_path: Path, cluster: str, place: Path) -> None:
    words = ["rollout.num_workers=1", "algorithm.kl_coef=0.01", "name=own"]
    with session(settings(place, tmp_path, *words)) as handles:
        rows = handles.policy.generate(handles.prompts.next(4), n=2)
        assert sum(len(pictures) for pictures in rows.blobs("pictures")) > 0
        behavior = rows.arrays("behavior_logprobs")
        for found, sampled in zip(handles.reference.logprobs(rows), behavior, strict=True):
            assert abs(found - sampled).mean() < 1e-5
