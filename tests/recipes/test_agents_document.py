"""The examples of docs/agents.md run as they stand there."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.workers.fresh_model import build_fresh_model
from tests.run_files import metrics_of

pytestmark = pytest.mark.real

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


SMALL = [
    "model.path=model", "rollout.engine=hf", "rollout.sampling.max_tokens=8", "rollout.num_threads=1",
    "trainer.num_threads=1", "trainer.max_steps=2", "trainer.groups_per_step=2", "algorithm.group_size=2",
    "name=example", "checkpoint.every_steps=0",
]  # fmt: skip
OWN_LOOP = "own_loop.py"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a model and questions."""
    build_fresh_model(tmp_path / "model", FreshModelConfig(num_layers=1, hidden_size=64, intermediate_size=64), seed=0)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)


def test_there_are_three_of_about_twenty_lines_and_a_loop() -> None:
    assert EXAMPLES.keys() == {*SETTINGS, OWN_LOOP}
    assert all(len(EXAMPLES[name].splitlines()) <= 25 for name in SETTINGS)


def test_a_loop_of_ones_own_trains_in_an_environment(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("guess.py", OWN_LOOP):
        (tmp_path / name).write_text(EXAMPLES[name])
    monkeypatch.setattr(sys, "argv", [OWN_LOOP, *SMALL])
    runpy.run_path(str(tmp_path / OWN_LOOP), run_name="__main__")
    lines = metrics_of(tmp_path / "runs" / "example")
    assert [line["step"] for line in lines] == [1, 2]
    assert all("actor/grad_norm" in line for line in lines)


@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains(name: str, tmp_path: Path, cluster: str) -> None:
    (tmp_path / name).write_text(EXAMPLES[name])
    lines = metrics_of(run(load_config([*SETTINGS[name], *SMALL]), quiet=True).directory)
    assert len(lines) == 2
    kinds = ("attempts_completed", "attempts_truncated")  # an untrained model speaks until it is cut
    attempts = sum(line.get(f"environment/{kind}", 0) for line in lines for kind in kinds)
    turns = sum(line["environment/turns"] for line in lines)
    assert 8 <= attempts <= 12  # the four of a third step may have ended before the second is logged
    assert turns >= (8 if name == "lookup.py" else 16)
