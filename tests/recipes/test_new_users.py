"""What a user makes first, by the text of README and docs/serve.md: a reward, an environment, an algorithm, a loop.

Each file is written into an empty directory, and the command below it is given there."""

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock import conf
from penstock.orchestrator.configuration.compose import load_config
from penstock.workers.fresh_model import build_fresh_model
from tests.run_files import metrics_of

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```\n\n    (penstock run .*?|python .*?)\n", re.DOTALL)
PAGES = "".join((ROOT / page).read_text() for page in ("README.md", "docs/serve.md"))
FOUND = {name: (code, command) for name, code, command in BLOCK.findall(PAGES)}
SCORE = re.compile(
    r"^(def score.*?\n)\n.*?^    (penstock run \S+ reward.function=my_reward.py:score)$", re.DOTALL | re.MULTILINE
)
FOUND["my_reward.py"] = SCORE.findall(PAGES)[0]  # the function of the first example, in a file
SMALL = [
    "warm_start.recipe=null", "model.path=model", "rollout.engine=hf", "rollout.num_threads=1", "trainer.num_threads=1",
    "rollout.max_model_len=64", "rollout.sampling.max_tokens=8", "trainer.max_steps=2", "trainer.groups_per_step=4",
    "algorithm.group_size=4", "evaluation.every_steps=0", "checkpoint.every_steps=0", "name=mine", "output_dir=out",
]  # fmt: skip
"""Words that make a run take seconds."""


RUNS = [
    ["recipe=arithmetic", "trainer.max_steps=2", "warm_start.overrides=[trainer.max_steps=3]"],
    ["recipe=gsm8k", "model=tiny", "trainer.max_steps=2", "data.path=train.jsonl"],
]
"""Runs that README names, with few steps."""


@pytest.mark.real
@pytest.mark.promise("Quick start")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[0])
def test_a_recipe_runs_as_readme_gives_it(
    run: list[str], tmp_path: Path, warm_python: list[str], driver_environment: Mapping[str, str]
) -> None:
    said = [f"{number} pears and one\n#### {number + 1}" for number in range(64)]
    rows = [json.dumps({"question": text.partition("\n")[0], "answer": text}) for text in said]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    words = [*run, "rollout.sampling.max_tokens=16", "evaluation.num_problems=16", "name=first"]
    ended = subprocess.run(
        [*warm_python, "-m", "penstock.cli.main", "run", *words],
        env=dict(driver_environment), cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    steps = [line for line in metrics_of(tmp_path / "runs" / "first") if "mismatch/logprob_abs_mean" in line]
    assert len(steps) == 2
    assert all(line["mismatch/logprob_abs_mean"] < 1e-4 for line in steps)  # of vLLM's tokens
    assert (tmp_path / "runs" / "first" / "report.html").exists()


@pytest.mark.real
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("my_reward.py", marks=pytest.mark.promise("Your own reward")),
        pytest.param("my_game.py", marks=pytest.mark.promise("Your own environment")),
        pytest.param("my_algorithm.py", marks=pytest.mark.promise("Your own algorithm")),
        pytest.param("my_loop.py", marks=pytest.mark.promise("Loops of your own")),
    ],
)
def test_what_readme_says_can_be_done(
    name: str, tmp_path: Path, warm_python: list[str], driver_environment: Mapping[str, str]
) -> None:
    code, command = FOUND[name]
    (tmp_path / name).write_text(code)
    rows = [json.dumps({"question": f"{number} + 1?", "answer": str(number + 1)}) for number in range(32)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    build_fresh_model(
        tmp_path / "model", conf.FreshModelConfig(num_layers=1, hidden_size=64, intermediate_size=64), seed=0
    )
    program, *words = shlex.split(command)
    given = [word for word in words if not word.startswith(("model.path=", "trainer.max_steps="))]
    small = [word for word in SMALL if name != "my_algorithm.py" or not word.startswith("algorithm.")]  # it has no keys
    started = ["-m", "penstock.cli.main"] if program == "penstock" else []
    ended = subprocess.run(
        [*warm_python, *started, *given, *small],
        env=dict(driver_environment), cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    lines = metrics_of(tmp_path / "out" / "mine")
    assert [line["step"] for line in lines] == [1, 2]
    assert all("actor/grad_norm" in line for line in lines)


def test_a_configuration_of_python_is_that_of_a_recipe() -> None:
    options = {
        "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2, "operators": ["+"],
        "allow_parentheses": False, "allow_negation": False,
    }  # fmt: skip
    loaded = load_config(["recipe=arithmetic"])
    made = conf.RunConfig(
        recipe="arithmetic",
        description=loaded.description,
        warm_start=conf.WarmStartConfig(recipe="arithmetic_sft"),
        data=conf.DataConfig(source="reasoning_gym", path="basic_arithmetic", options=options, chat_template=False),
        reward=conf.RewardConfig(function="reasoning_gym", options={"strict": True}),
        algorithm=conf.GrpoConfig(),
        rollout=conf.RolloutConfig(max_model_len=64, kv_cache_gib=0.25, sampling=conf.SamplingConfig(max_tokens=6)),
        trainer=conf.TrainerConfig(
            groups_per_step=32, optimizer=conf.OptimizerConfig(lr=5e-4, warmup_steps=5, schedule="cosine")
        ),
        evaluation=conf.EvaluationConfig(every_steps=10, num_problems=256),
    )
    assert made == loaded
