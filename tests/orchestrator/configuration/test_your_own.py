"""What docs/algorithms.md shows of algorithms of one's own works as written, from a file to `penstock validate`."""

import re
from pathlib import Path

import pytest
import torch

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.catalogue import build_dataflow
from penstock.cli.main import main
from penstock.orchestrator.configuration.compose import load_config
from tests.registries import names_for_a_test

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
FILES = {"mine.py": 20, "formulas.py": 20, "my_duel.py": 30}
"""Most lines that each may have."""
FORMULAS = [
    "algorithm=policy_gradient",
    "algorithm.advantage=above_median",
    "algorithm.surrogate=my_spo",
    "algorithm.surrogate_options.clip=0.3",
    "algorithm.correction=root",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The page's files, under the names that it gives them."""
    directory = tmp_path_factory.mktemp("own")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for (name, longest), block in zip(FILES.items(), blocks, strict=True):
        assert f"`{name}`" in PAGE
        assert len([line for line in block.splitlines() if line.strip()]) <= longest
        (directory / name).write_text(block)
    with names_for_a_test():
        yield directory


@pytest.fixture
def validated(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def validate(*words, recipe="recipe=arithmetic"):
        code = main(["validate", recipe, *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return validate


@pytest.mark.real
def test_a_dataflow_from_a_file_passes_validation_and_is_drawn(validated):
    code, text = validated("algorithm=mine.py:mine", "algorithm.group_size=8")
    assert code == 0, text
    assert "8 samples a prompt" in text
    assert "best_of_group" in text
    assert "the same for a batch, for its halves, and with more padding" in text


@pytest.mark.real
def test_formulas_from_a_file_pass_validation_by_their_names(validated):
    code, text = validated("imports=[formulas.py]", *FORMULAS)
    assert code == 0, text
    assert "advantage" in text


@pytest.mark.real
def test_two_policies_from_a_file_pass_validation_by_the_command_of_the_page(validated):
    command = re.search(r"penstock run (algorithm=my_duel.*?)\n\n", PAGE, re.DOTALL)
    words = command[1].replace("\\\n", " ").replace("model.path=MY_MODEL", "rollout.engine=hf").split()
    code, text = validated(*words, recipe="model=tiny")
    assert code == 0, text
    assert "solver, 8 attempts a task" in text
    assert "solver, push; proposer, push" in text


def test_what_the_page_shows_computes(files, monkeypatch):
    monkeypatch.chdir(files)
    flow = build_dataflow(load_config(["recipe=arithmetic", "algorithm=mine.py:mine"]).algorithm)
    assert flow.stage("best_of_group").function(torch.tensor([0.0, 2.0, 1.0])).tolist() == [0.0, 1.0, 0.0]
    logprobs, ones = torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2)
    loss, _ = flow.stage("train").function(
        logprobs=logprobs, mask=ones, totals=BatchTotals(2, 1), advantage=torch.tensor([1.0])
    )
    assert loss.item() == 2.0  # the mean of 1 and 3

    flow = build_dataflow(load_config(["recipe=arithmetic", "imports=[formulas.py]", *FORMULAS]).algorithm)
    assert flow.stage("advantage").function(torch.tensor([0.0, 1.0, 4.0])).tolist() == [-1.0, 0.0, 3.0]
    loss, metrics = flow.stage("train").function(
        logprobs, ones, BatchTotals(2, 1), torch.tensor([1.0]), logprobs, logprobs
    )
    assert loss.item() == -1.0  # on policy: ratio 1, no penalty, weight 1
    assert metrics["ratio"].item() == metrics["correction_weight_mean"].item() == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm=mine.py:mine", "algorithm.group_size=four"], "algorithm.group_size=four"),
        (["algorithm=mine.py:mine", "algorithm.group_sizes=4"], "did you mean algorithm.group_size?"),
        (["algorithm=mine.py:mime"], "did you mean 'mine'"),
        (
            ["imports=[formulas.py]", *FORMULAS, "algorithm.surrogate_options.clip=-1"],
            "must be a finite number, at least",
        ),
        (["imports=[formulas.py]", *FORMULAS, "algorithm.surrogate_options.clp=1"], "did you mean 'clip'"),
        (["imports=[formulas.py]", *FORMULAS, "algorithm.correction=roots"], "did you mean 'root'"),
    ],
)
def test_what_does_not_fit_a_file_of_ones_own_is_named(validated, words, message):
    code, text = validated(*words)
    assert code == 2
    assert message in " ".join(text.split())
