"""Runs on one machine whose members die and hang at random moments: they end with the weights of a run in which nothing
happened, bit for bit, and keep their promises. `make chaos` draws many."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.orchestrator.recovery.takeover import ANSWER_S
from tests.chaos.bed import OneMachine
from tests.chaos.checker import Promises, answers_of, broken
from tests.chaos.disturbance import Disturbed
from tests.chaos.outcome import note
from tests.chaos.plan import COMMAND, IS_CHAOS, KILL, NET_S, SEEDS, STOP, Target, draw
from tests.model_files import load_model
from tests.orchestrator.runs import duel

pytestmark = pytest.mark.real

STEPS = 36
HEARTBEAT_S, START_S = 10.0, 40.0
NOTICED_S = {KILL: 30.0, STOP: ANSWER_S + 30.0} if IS_CHAOS else {KILL: NET_S, STOP: NET_S}
"""Ray tells of a death within a second where the machine is idle. A command that takes the run over gives members
`ANSWER_S` to answer, so that one who is stopped then is noticed as late."""
SETTINGS = [
    "rollout.engine=hf", "rollout.num_workers=2", "rollout.num_threads=1", "trainer.num_threads=1",
    f"trainer.max_steps={STEPS}", "checkpoint.every_steps=2", "tracking.samples_every_steps=1",
    "faults.heartbeat_s=0.5", f"faults.heartbeat_timeout_s={HEARTBEAT_S:g}", "faults.max_restarts=1000",
    "faults.max_returns=1000", "faults.pause_s=0.1", "faults.window_s=5", f"rollout.start_timeout_s={START_S:g}",
]  # fmt: skip
MEMBERS = [
    "Rollout-0", "Rollout-1", "Reward-0", "Compute-group_advantage", "Prompts", "Trainer-policy-0",
    "Scorer-reference-0",
]  # fmt: skip
TARGETS = [
    *(Target(who, KILL) for who in MEMBERS), Target("Rollout-0", STOP), Target("Trainer-policy-0", STOP),
    Target("Store", KILL), Target("Store", STOP), Target("Agent", KILL), Target(COMMAND, KILL),
]  # fmt: skip


DUEL = Path(duel.__file__)
TWO_POLICIES = [
    f"algorithm={DUEL}:two_policies", f"environment.name={DUEL}:Duel", "data.source=environment", "data.path=null",
    "environment.num_workers=2",
]  # fmt: skip
ADAPTERS = ["trainer.lora.rank=8", "trainer.lora.publish=adapter"]
TWO_POLICIES_TARGETS = [
    *(Target(who, KILL) for who in ("Rollout-0", "Rollout-1", "Trainer-policies-0", "Environment-0", "Environment-1")),
    Target("Rollout-1", STOP), Target("Trainer-policies-0", STOP), Target("Store", KILL), Target("Agent", KILL),
    Target(COMMAND, KILL),
]  # fmt: skip


@pytest.fixture(scope="module")
def words(small_run: list[str]) -> list[str]:
    return [*small_run, *SETTINGS, "algorithm.kl_coef=0.05"]


@pytest.fixture(scope="module")
def bed(driver_environment: dict[str, str]) -> OneMachine:
    return OneMachine(driver_environment)


@pytest.fixture(scope="module")
def undisturbed(
    bed: OneMachine, warm_python: list[str], words: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("chaos") / "undisturbed"
    Disturbed(bed, warm_python, words, directory).go([])
    return directory


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_in_which_everybody_dies_ends_with_the_bits_of_an_undisturbed_one(
    seed: int, bed: OneMachine, warm_python: list[str], words: Sequence[str], undisturbed: Path, tmp_path: Path
) -> None:
    """With an odd seed engines and ranks take turns on the same devices."""
    directory, turns = tmp_path / f"chaos-{seed}", ["placement=colocated"] * (seed % 2)
    done = Disturbed(bed, warm_python, [*words, *turns], directory, retries=20).go(draw(seed, TARGETS, STEPS))
    said = directory.with_name(f"{directory.name}.log").read_text()
    if any(one.who == COMMAND for one in done):  # else the run was over sooner
        assert f"{directory.name} has ended (killed by SIGKILL); continuing it in" in said
    note(answers_of(directory, done))
    assert not broken(directory, Promises(STEPS, 4, 4, 0, NOTICED_S, START_S), done), json.dumps(
        [vars(one) for one in done]
    )
    assert_same(undisturbed / "model", directory / "model")


@pytest.mark.parametrize("seed", SEEDS)
def test_two_policies_in_which_everybody_dies_end_with_the_same_bits(
    seed: int, bed: OneMachine, warm_python: list[str], small_run: list[str], tmp_path: Path
) -> None:
    """With an odd seed they are whole models."""
    words = [*small_run, *SETTINGS, *TWO_POLICIES, *(() if seed % 2 else ADAPTERS)]
    directory, undisturbed = tmp_path / f"two-{seed}", tmp_path / "undisturbed"
    Disturbed(bed, warm_python, words, undisturbed).go([])
    done = Disturbed(bed, warm_python, words, directory, retries=20).go(draw(seed, TWO_POLICIES_TARGETS, STEPS))
    note(answers_of(directory, done))
    assert not broken(directory, Promises(STEPS, 4, 2 * 4, 0, NOTICED_S, START_S), done), json.dumps(
        [vars(one) for one in done]
    )
    for policy in ("solver", "proposer"):
        assert_same(undisturbed / "model" / policy, directory / "model" / policy)


def assert_same(one: Path, other: Path) -> None:
    """Assert that two models are one, bit for bit."""
    expected, found = load_model(one), load_model(other)
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
