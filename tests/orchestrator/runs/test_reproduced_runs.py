"""A run is made again with the same bits, and a planted difference is found in its step and its quantity."""

import json
import shutil
from pathlib import Path

import pytest

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.manifest import read_manifest
from penstock.orchestrator.reproduce import diff, reproduce
from penstock.orchestrator.run import run
from tests.run_files import metrics_of, samples_of

pytestmark = pytest.mark.real
REWARD = """
def length(response, task):
    bonus = {bonus} if {words!r} in task["prompt"] else 0.0
    return float(len(response)) + bonus
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory, small_run, cluster):
    """A run of four steps whose model, data and reward are files that a test may change in a copy of its folder."""
    folder = tmp_path_factory.mktemp("original")
    model, data = (Path(word.split("=")[1]) for word in small_run[:2])
    shutil.copytree(model, folder / "model")
    shutil.copy(data, folder / "prompts.jsonl")
    (folder / "reward.py").write_text(REWARD.format(bonus=0.0, words=""))
    words = [
        *small_run, f"model.path={folder}/model", f"data.path={folder}/prompts.jsonl", "rollout.engine=hf",
        f"reward.function={folder}/reward.py:length", "rollout.num_workers=2", "trainer.max_steps=4",
        "trainer.optimizer.schedule=cosine", "tracking.samples_every_steps=1", f"output_dir={folder}/runs",
        "name=first",
    ]  # fmt: skip
    return run(load_config(words), quiet=True).directory


@pytest.fixture
def planted(original):
    """The folder of the run's files, which are put back afterwards."""
    folder = original.parents[1]
    kept = {file: file.read_bytes() for file in [*folder.glob("model/*"), *folder.glob("*.*")] if file.is_file()}
    yield folder
    for file, content in kept.items():
        file.write_bytes(content)


def again(run: Path, name: str, **options) -> tuple[int, str]:
    told: list[str] = []
    code = reproduce(str(run), told.append, directory=str(run.parent / name), **options)
    return code, "\n".join(told)


def question_of(original: Path, step: int) -> str:
    """Words of a row that was first trained in this step."""
    asked = [{json.loads(row["task"])["prompt"] for row in samples_of(original, each)} for each in range(1, step + 1)]
    return min(asked[-1] - set().union(*asked[:-1]))


def test_every_step_has_a_hash_of_each_quantity_and_the_run_a_manifest(original):
    names = {"prompts", "tokens", "logprobs", "rewards", "advantages", "gradients", "weights"}
    lines = metrics_of(original)
    assert [{key for key in line if key.startswith("hash/")} for line in lines] == [
        {f"hash/{one}" for one in names}
    ] * 4
    assert len({line[f"hash/{name}"] for line in lines for name in names}) == 4 * len(names)
    manifest = read_manifest(original)
    assert manifest["chosen"]["threads"] == {"Rollout-0": 1, "Rollout-1": 1, "Trainer-policy-0": 1}
    assert len(manifest["models"]["policy"]["hash"]) == 32
    assert manifest["processes"].keys() == {"rollout", "trainer"}
    assert manifest["data"]["rows"] == 64
    assert {"torch", "ray"} < manifest["lock"].keys()


@pytest.mark.promise("Is a rerun equal?")
def test_a_run_is_made_again_with_the_same_bits_also_its_first_steps_alone(original):
    code, told = again(original, "again", steps=2)
    assert code == 0, told
    assert "the same bits up to step 2" in told
    assert "their manifests are the same" in told
    assert [line["step"] for line in metrics_of(original.parent / "again")] == [1, 2]
    learning_rates = [
        [line["actor/lr"] for line in metrics_of(each)[:2]] for each in (original, original.parent / "again")
    ]
    assert learning_rates[0] == learning_rates[1]
    compared: list[str] = []
    assert diff(str(original), str(original.parent / "again"), compared.append) == 0
    assert compared[0] == "the same bits up to step 2"


def test_a_changed_row_of_the_data_is_found_where_it_is_first_asked(original, planted):
    question = question_of(original, 3)
    file = planted / "prompts.jsonl"
    file.write_text(file.read_text().replace(f'"{question}"', f'"{question[:-1]}S"'))
    code, told = again(original, "other_row")
    assert code == 1
    assert "the same bits up to step 2; step 3 is the first that differs, in its prompts" in told
    assert "data.parts..digest" in told


def test_another_reward_is_found_where_it_first_gives_another_number(original, planted):
    (planted / "reward.py").write_text(REWARD.format(bonus=1.0, words=question_of(original, 2)))
    code, told = again(original, "other_reward")
    assert code == 1
    assert "the same bits up to step 1; step 2 is the first that differs, in its rewards" in told
    assert f"code.files.{planted}/reward.py" in told


def test_a_changed_byte_of_the_model_is_found_in_the_first_step(original, planted):
    file = planted / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 0x40
    file.write_bytes(content)
    code, told = again(original, "other_model")
    assert code == 1
    assert "step 1 is the first that differs, in its " in told
    assert "models.policy.hash" in told
