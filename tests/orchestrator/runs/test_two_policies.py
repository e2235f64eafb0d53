"""Whole runs of two policies that play each other: with `max_staleness=0` they are two straight lines bit for bit, and
neither a death nor an interruption changes anything."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.checkpointing.export import export_checkpoint
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.run import RunResult, run
from penstock.workers.fresh_model import build_fresh_model
from tests.orchestrator.runs import reference_loop
from tests.orchestrator.runs.duel import both
from tests.orchestrator.runs.killing import Killing
from tests.run_files import events_of, metrics_of, samples_of

pytestmark = pytest.mark.real

ALL_RANKS = "Trainer-policies-0 to Trainer-policies-1"
"""Name by which ranks are started anew: where one dies, the others cannot go on without it."""
GAME = Path(__file__).parent / "duel.py"
POLICIES = ("solver", "proposer")
STEPS, GROUPS, SIZE = 5, 4, 4
KINDS = {
    "adapters": (
        "trainer.lora.rank=8", "trainer.lora.publish=adapter", "trainer.optimizer.lr=1e-2",
        "trainer.policies.proposer.optimizer={lr: 3e-2}",
    ),
    "models": ("trainer.optimizer.lr=1e-3", "trainer.policies.proposer.optimizer={lr: 3e-3}"),
    "ranks": (
        "trainer.optimizer.lr=1e-3", "trainer.policies.proposer.optimizer={lr: 3e-3}", "trainer.num_ranks=2",
        "trainer.policies.solver.num_ranks=1", "trainer.policies.proposer.num_ranks=1",
    ),
}  # fmt: skip
"""Words of a run whose policies are adapters of one model, whole models, or whole models with ranks of their own."""
FILES = dict.fromkeys(KINDS, "model.safetensors") | {"adapters": "adapter/adapter_model.safetensors"}
"""File of what is trained of a policy, in its export."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build_fresh_model(path, FreshModelConfig(num_layers=2, hidden_size=64, intermediate_size=128), seed=3)
    return str(path)


@pytest.fixture(scope="module")
def smaller_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("smaller")
    build_fresh_model(path, FreshModelConfig(num_layers=1, hidden_size=32, intermediate_size=64), seed=4)
    return str(path)


@dataclass
class Game:
    """Runs of one kind, and what they must come to."""

    kind: str
    words: list[str]
    expected: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Tensors by policy and name."""
    start: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Those that do not start as zeros."""

    def settings(self, directory: Path, *more: str) -> Any:
        return load_config(
            [
                f"environment.name={GAME}:Duel", "data.source=environment", "rollout.engine=hf",
                "rollout.num_workers=2", "rollout.sampling.max_tokens=12", "rollout.num_threads=1",
                "trainer.num_threads=1", "trainer.share_prefixes=never",
                f"trainer.max_steps={STEPS}", f"trainer.groups_per_step={GROUPS}",
                f"algorithm.group_size={SIZE}", "trainer.policies.proposer.every=2", f"output_dir={directory}",
                "faults.pause_s=0.1", *self.words, *more,
            ]
        )  # fmt: skip

    def different(self, result: RunResult) -> list[str]:
        """Names of the exported tensors that are not the expected ones, bit for bit."""
        found = []
        for policy, tensors in self.expected.items():
            own = load_file(result.model / policy / FILES[self.kind])
            assert own.keys() == tensors.keys() != set()
            found += [f"{policy}/{name}" for name, one in tensors.items() if not np.array_equal(own[name].numpy(), one)]
        return found


@pytest.fixture(scope="module")
def games(model_path: str, smaller_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Game]:
    threads = torch.get_num_threads()
    games = {kind: Game(kind, [f"model.path={model_path}", *words]) for kind, words in KINDS.items()}
    models, ranks = games["models"], games["ranks"]
    models.words.append(f"model.paths.proposer={smaller_path}")
    for policy, path in {"solver": model_path, "proposer": smaller_path}.items():
        models.start[policy] = {name: one.numpy() for name, one in load_file(f"{path}/model.safetensors").items()}
    ranks.words.append(models.words[-1])
    try:
        for game in (games["adapters"], models):
            config = resolve(game.settings(tmp_path_factory.mktemp("lines")), both(SIZE)).config
            game.expected = reference_loop.train_two(config, model_path)
        ranks.expected, ranks.start = models.expected, models.start
    finally:
        torch.set_num_threads(threads)
    return games


@pytest.fixture(params=KINDS)
def game(games: dict[str, Game], request: pytest.FixtureRequest) -> Game:
    return games[request.param]


def test_two_policies_are_two_straight_lines_bit_for_bit(tmp_path: Path, cluster: str, game: Game) -> None:
    words = ["name=exact", "environment.num_workers=2", "tracking.samples_every_steps=1"]
    result = run(game.settings(tmp_path, *words), both(SIZE), quiet=True)
    assert game.different(result) == []
    for policy, tensors in game.expected.items():
        start = game.start.get(policy, {})
        changes = {name: one - start.get(name, 0.0) for name, one in tensors.items() if ".lora_A." not in name}
        assert all(np.abs(change).max() > 1e-3 for change in changes.values()), "nothing was trained"
    lines = metrics_of(result.directory)
    assert [line["staleness/max"] for line in lines] == [0.0] * STEPS
    assert all(line["mismatch/logprob_abs_max"] < 1e-4 for line in lines)
    left_out = [line["proposer/rows_left_out"] for line in lines]
    assert left_out == [GROUPS * SIZE if step % 2 else 0.0 for step in range(1, STEPS + 1)]
    rate = 1e-2 if game.kind == "adapters" else 1e-3
    assert all("solver/pg_loss" in line and line["solver/lr"] == pytest.approx(rate) for line in lines)
    assert ["proposer/lr" in line for line in lines] == [step % 2 == 0 for step in range(1, STEPS + 1)]
    said = [row["policy"] for row in samples_of(result.directory, 2)]
    assert {name: said.count(name) for name in said} == dict.fromkeys(game.expected, GROUPS * SIZE)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("adapters", "Rollout-1"), ("adapters", "Trainer-policies-0"), ("adapters", "Environment-0"),
        ("models", "Rollout-0"), ("models", "Rollout-1"), ("models", "Trainer-policies-0"),
        ("ranks", "Trainer-policies-0"), ("ranks", "Trainer-policies-1"),
    ],
)  # fmt: skip
def test_a_death_changes_nothing(tmp_path: Path, cluster: str, games: dict[str, Game], kind: str, name: str) -> None:
    game = games[kind]
    result = run(
        game.settings(tmp_path, "name=killed"), both(SIZE), quiet=True, sinks=[Killing(tmp_path / "killed", name, 2)]
    )
    assert game.different(result) == []
    recovered = [event["member"] for event in events_of(result.directory) if event["kind"] == "recovered"]
    assert recovered == [ALL_RANKS if kind == "ranks" and name in ALL_RANKS else name]


def test_a_run_that_goes_on_is_the_run_that_was_never_interrupted(tmp_path: Path, cluster: str, game: Game) -> None:
    """It goes on after step 3, of which the proposer has learned in one. The checkpoint has the models, too."""
    words = ["name=parts", "checkpoint.every_steps=1"]
    run(game.settings(tmp_path, *words, "trainer.max_steps=4"), both(SIZE), quiet=True)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "global_step_4")  # as if it was killed before that
    result = run(game.settings(tmp_path, *words, "resume=auto"), both(SIZE), quiet=True)
    assert [line["step"] for line in metrics_of(result.directory)] == [1, 2, 3, 4, 5]
    assert game.different(result) == []
    export_checkpoint(str(result.directory), written := tmp_path / "written")
    assert game.different(SimpleNamespace(model=written)) == []


def test_engines_and_ranks_that_take_turns_change_no_bit(tmp_path: Path, cluster: str, game: Game) -> None:
    result = run(game.settings(tmp_path, "name=turns", "placement=colocated"), both(SIZE), quiet=True)
    assert game.different(result) == []


def test_an_asynchronous_run_keeps_the_bound(tmp_path: Path, cluster: str, game: Game) -> None:
    more = ["rollout.num_workers=3", "trainer.num_ranks=2"]
    config = game.settings(tmp_path, "name=ahead", "max_staleness=2", "trainer.max_steps=8", *more)
    lines = metrics_of(run(config, both(SIZE), quiet=True).directory)
    assert len(lines) == 8
    assert max(line["staleness/max"] for line in lines) in (1.0, 2.0)
    assert not any(line.get("dropped/stale") for line in lines)


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of a model, whose ranks write a file each."""
    return {name: one for file in directory.glob("*.safetensors") for name, one in load_file(file).items()}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((2, 1), ()), ((2, 2), ("trainer.tensor_parallel_size=2",)), ((2, 2), ("trainer.sequence_parallel_size=auto",))],
    ids=["rows", "layers", "tokens"],
)
def test_ranks_of_a_policy_share_its_rows(
    tmp_path: Path, cluster: str, games: dict[str, Game], ranks: tuple[int, int], words: tuple[str, ...]
) -> None:
    """One step from the same weights: ranks of the solver and ranks of the proposer make what one rank of both makes,
    but for rounding, and report each token."""
    of_policies = [f"trainer.policies.{name}.num_ranks={count}" for name, count in zip(POLICIES, ranks, strict=True)]
    own = [f"trainer.num_ranks={sum(ranks)}", *of_policies, *words]
    common = ["trainer.max_steps=1", "trainer.policies.proposer.every=1", "tracking.samples_every_steps=1"]
    one = run(games["models"].settings(tmp_path, "name=one", *common), both(SIZE), quiet=True)
    three = run(games["models"].settings(tmp_path, "name=three", *common, *own), both(SIZE), quiet=True)
    for policy, rate in {"solver": 1e-3, "proposer": 3e-3}.items():
        expected, found = (tensors_in(each.model / policy) for each in (one, three))
        assert found.keys() == expected.keys()
        assert max(float((found[name] - expected[name]).abs().max()) for name in found) < 0.05 * rate
    (line,), (other,) = metrics_of(one.directory), metrics_of(three.directory)
    for name in ("solver/pg_loss", "proposer/pg_loss", "solver/grad_norm", "proposer/entropy"):
        assert other[name] == pytest.approx(line[name], rel=1e-4, abs=1e-6)
    rows, of_three = samples_of(one.directory, 1), samples_of(three.directory, 1)
    assert [row["response_ids"] for row in of_three] == [row["response_ids"] for row in rows]
    assert [row["loss_mask"] for row in of_three] == [row["loss_mask"] for row in rows]
    for row, other_row in zip(rows, of_three, strict=True):
        assert other_row["trainer_logprobs"] == pytest.approx(row["trainer_logprobs"], abs=1e-4)
