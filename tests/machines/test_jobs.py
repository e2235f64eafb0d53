"""`ray job submit` from a machine that is no part of the cluster, with one's own files along."""

import json
from pathlib import Path

import pytest

from penstock.workers.fresh_model import build_fresh_model
from tests.machines.cluster import ROOT, machines
from tests.orchestrator.conftest import SMALL_MODEL
from tests.run_files import metrics_of

pytestmark = [pytest.mark.real, pytest.mark.machines]

REWARD = """
from weights_of_words import DIGIT

def score(response):
    return DIGIT * sum(character.isdigit() for character in response)
"""
ALGORITHM = """
from penstock import AlgorithmConfig, Dataflow, algorithm
from penstock.algorithms.losses import ppo_clip_loss
from penstock.algorithms.advantages import group_advantage

@algorithm("mine")
def mine(cfg: AlgorithmConfig) -> Dataflow:
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=4)
    flow.reward()
    flow.compute(group_advantage, reads=["reward"], writes=["advantage"])
    return flow.train("policy", loss=ppo_clip_loss)
"""


METADATA = """
import json
from ray.job_submission import JobSubmissionClient

(job,) = JobSubmissionClient("http://10.77.0.1:8265").list_jobs()
print("metadata", json.dumps(job.metadata))
"""


def test_a_job_from_a_laptop_brings_its_own_reward_and_algorithm(warm_python, tmp_path):
    warm = Path(warm_python[0]).parent
    build_fresh_model(tmp_path / "model", SMALL_MODEL, seed=3)
    lines = [json.dumps({"question": f"{i} and {i * i} are numbers", "answer": str(i)}) for i in range(64)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    with machines(3, keep=[warm, tmp_path]) as cluster:
        cluster.start_ray(num_cpus=[1, 2, 1], num_nodes=2, takes_jobs=True, warm=warm)
        laptop = cluster[3]
        laptop.run(["mkdir", "/tmp/mine"])
        for name, text in (("rewards.py", REWARD), ("weights_of_words.py", "DIGIT = 0.25\n"), ("own.py", ALGORITHM)):
            laptop.run(["sh", "-c", f"cat > /tmp/mine/{name}"], input=text)
        submit = [*warm_python, "-m", "ray.scripts.scripts", "job", "submit", "--address", "http://10.77.0.1:8265"]
        words = [
            f"model.path={tmp_path}/model", f"data.path={tmp_path}/prompts.jsonl", "rollout.max_model_len=64",
            "rollout.sampling.max_tokens=12", "reward.function=rewards.py:score", "algorithm=own.py:mine",
            "trainer.groups_per_step=4", "rollout.engine=hf", "trainer.max_steps=2", f"output_dir={tmp_path}/runs",
            "name=job",
        ]  # fmt: skip
        penstock = [*warm_python, "-m", "penstock.cli.main", "run", *words]
        given = ["--metadata-json", json.dumps({"penstock.recipe": "mine", "team": "red"})]
        laptop.run([*submit, *given, "--working-dir", "/tmp/mine", "--", *penstock], cwd=ROOT, timeout_s=900)
        told = laptop.run([*warm_python, "-c", METADATA], cwd=ROOT, timeout_s=300).stdout
        hosts = [cluster[number].hostname for number in (1, 2)]
    directory = tmp_path / "runs" / "job"
    (metadata,) = [json.loads(line.removeprefix("metadata ")) for line in told.splitlines() if "metadata" in line]
    assert {name: text for name, text in metadata.items() if not name.startswith("job_")} == {  # these are Ray's own
        "penstock.run": "job", "penstock.run_id": (directory / "run_id").read_text().strip(),
        "penstock.recipe": "mine", "penstock.algorithm": "mine", "penstock.directory": str(directory),
        "penstock.page": f"penstock ui {directory}", "team": "red",
    }  # fmt: skip
    # 16 samples of quarters.
    assert all(line["reward/mean"] * 64 % 1 == 0 for line in metrics_of(directory))
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    placed = next(event["actors"] for event in events if event["kind"] == "placed")
    assert placed["Reward-0"] == placed["Rollout-0"] == hosts[1]
    assert placed["Store"] == hosts[0]
