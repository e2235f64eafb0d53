"""The three examples of docs/agents.md run as they stand there."""

import json
import re
from pathlib import Path

import pytest

from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.workers.fresh_model import build_fresh_model
from tests.run_files import metrics_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DOCUMENT = Path(__file__).parents[2] / "docs" / "agents.md"
EXAMPLES = {
    name: code
    for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    if (name := code.partition("\n")[0].removeprefix("# ")).endswith(".py")
}
SETTINGS = {
    "guess.py": ["environment.name=guess.py:Guess", "data.source=environment"],
    "lookup.py": ["environment.name=lookup.py:Quiz", "data.source=environment", "environment.gateway.tools=pythonic"],
    "agent.py": ["environment.name=agent", "environment.options.function=agent.py:solve", "data.path=questions.jsonl"],
}


def test_there_are_three_of_about_twenty_lines() -> None:
    assert EXAMPLES.keys() == SETTINGS.keys()
    assert all(len(code.splitlines()) <= 25 for code in EXAMPLES.values())


@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains(name: str, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build_fresh_model(tmp_path / "model", FreshModelConfig(num_layers=1, hidden_size=64, intermediate_size=64), seed=0)
    (tmp_path / name).write_text(EXAMPLES[name])
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(
        [
            *SETTINGS[name], "model.path=model", "rollout.engine=hf", "rollout.sampling.max_tokens=8",
            "rollout.num_threads=1", "trainer.num_threads=1", "trainer.max_steps=2", "trainer.groups_per_step=2",
            "algorithm.group_size=2", "name=example", "checkpoint.every_steps=0",
        ]
    )  # fmt: skip
    lines = metrics_of(run(config, quiet=True).directory)
    assert len(lines) == 2
    kinds = ("attempts_completed", "attempts_truncated")  # an untrained model speaks until it is cut
    attempts = sum(line.get(f"environment/{kind}", 0) for line in lines for kind in kinds)
    turns = sum(line["environment/turns"] for line in lines)
    assert attempts == 8
    assert turns >= (8 if name == "lookup.py" else 16)
