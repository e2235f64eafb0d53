"""Real runs whose actors are killed at chosen steps: what is replaced alone, what costs a return, and that the weights
are those of a run in which nothing died, bit for bit. At random moments: `tests/chaos`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from tests.chaos.bed import OneMachine
from tests.chaos.disturbance import Disturbed
from tests.chaos.plan import KILL, STOP, Fault, Target
from tests.model_files import load_model
from tests.run_files import events_of, metrics_of

pytestmark = pytest.mark.real

STEPS, LATE, EVERY = 12, 7, 4


@pytest.fixture(scope="module")
def words(small_run: list[str]) -> list[str]:
    return [
        *small_run, "rollout.num_threads=1", "trainer.num_threads=1", "rollout.engine=hf", f"trainer.max_steps={STEPS}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(words: list[str], cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    return run(load_config([*words, f"output_dir={output}", "name=run"]), quiet=True).directory


@pytest.fixture
def disturbed(
    words: list[str], warm_python: list[str], driver_environment: dict[str, str], tmp_path: Path
) -> Callable[..., Path]:
    """A run in which these are killed, one after each step; its directory."""

    def go(*victims: str | Fault, more: tuple[str, ...] = ()) -> Path:
        faults = [
            Fault(Target(victim, KILL), step, 0.0) if isinstance(victim, str) else victim
            for step, victim in enumerate(victims, 1)
        ]
        started = Disturbed(OneMachine(driver_environment), warm_python, [*words, *more], tmp_path / "run")
        started.go(faults)
        return started.directory

    return go


def kinds_of(directory: Path) -> list[str]:
    return [event["kind"] for event in events_of(directory)]


def assert_same_model(one: Path, other: Path) -> None:
    expected, found = (load_model(directory / "model") for directory in (one, other))
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)


@pytest.mark.promise("4 replaced", "Workers die")
def test_what_is_replaced_changes_no_bit(disturbed: Callable[..., Path], undisturbed: Path) -> None:
    members = ["Rollout-0", "Reward-0", "Compute-group_advantage", "Prompts", "Trainer-policy-0", "Store"]
    quick = ("faults.heartbeat_s=0.5", "faults.heartbeat_timeout_s=10", "faults.pause_s=0.1")
    directory = disturbed(*members, Fault(Target("Rollout-0", STOP), LATE, 0.0), more=quick)
    assert [line["step"] for line in metrics_of(directory)] == list(range(1, STEPS + 1))
    assert_same_model(directory, undisturbed)
    kinds = kinds_of(directory)
    assert kinds.count("fault") == kinds.count("recovered") == len(members) + 1
    assert "returned" not in kinds
    last = metrics_of(directory)[-1]
    counts = {role: last[f"faults/{role}"] for role in ("rollout", "reward", "compute", "prompts", "trainer", "store")}
    assert counts == {"rollout": 2, "reward": 1, "compute": 1, "prompts": 1, "trainer": 1, "store": 1}
    assert last["faults/lost_s"] > 0
    (ended,) = (event for event in events_of(directory) if event["kind"] == "ended")
    assert (ended["member"], ended["state"]) == ("Rollout-0", "silent")
    assert "Rollout-0" in (directory / ended["stacks"]).read_text(), "who hangs leaves its stacks"


def test_where_devices_are_shared_it_is_replaced_in_its_turn(disturbed: Callable[..., Path], undisturbed: Path) -> None:
    members = ["Rollout-0", "Trainer-policy-0", "Store", "Rollout-1", "Trainer-policy-0", "Reward-0"]
    more = ("placement=colocated", "rollout.num_workers=2", "faults.pause_s=0.1")
    directory = disturbed(*members, more=more)
    assert [line["step"] for line in metrics_of(directory)] == list(range(1, STEPS + 1))
    assert_same_model(directory, undisturbed)
    kinds = kinds_of(directory)
    assert kinds.count("fault") == kinds.count("recovered") == len(members)
    assert not {"returned", "state_not_kept"} & set(kinds)


@pytest.mark.parametrize(
    ("name", "more"),
    [("Scorer-reference-0", "algorithm.kl_coef=0.05"), ("Trainer-policy-1", "trainer.num_ranks=2")],
)
def test_a_gang_is_replaced_as_one(
    name: str, more: str, words: list[str], cluster: str, disturbed: Callable[..., Path], tmp_path: Path
) -> None:
    whole = run(load_config([*words, more, f"output_dir={tmp_path}", "name=whole"]), quiet=True).directory
    directory = disturbed(name, more=(more,))
    assert [line["step"] for line in metrics_of(directory)] == list(range(1, STEPS + 1))
    assert_same_model(directory, whole)
    kinds = kinds_of(directory)
    assert kinds.count("fault") == kinds.count("recovered") == 1


def test_copies_beside_the_next_step_change_no_bit_whichever_rank_is_lost(
    warm_python: list[str], driver_environment: dict[str, str], cluster: str, tmp_path: Path
) -> None:
    """Demonstrations need no engine, so what is trained does not depend on time."""
    words = [
        "recipe=sft", "trainer.groups_per_step=8", "trainer.num_ranks=2", "trainer.num_threads=1", "max_staleness=1",
        f"trainer.max_steps={STEPS}", "trainer.optimizer.warmup_steps=2", "faults.pause_s=0.1",
    ]  # fmt: skip
    within = run(load_config([*words, f"output_dir={tmp_path}", "name=within"]), quiet=True).directory
    started = Disturbed(
        OneMachine(driver_environment), warm_python, [*words, "faults.keep_beside=always"], tmp_path / "beside"
    )
    lost = [("Trainer-policy-0", 2), ("Trainer-policy-1", 6), ("Store", 9)]
    started.go([Fault(Target(name, KILL), step, 0.0) for name, step in lost])
    directory = started.directory
    lines = metrics_of(directory)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["store/rows_trained"] == STEPS * 8
    assert all(line["timing_s/keep"] > 0 for line in lines)
    assert_same_model(directory, within)
    kinds = kinds_of(directory)
    assert kinds.count("fault") == kinds.count("recovered") == len(lost)
    assert not {"returned", "state_not_kept"} & set(kinds)


def test_what_cannot_be_replaced_alone_costs_the_steps_since_the_checkpoint(
    disturbed: Callable[..., Path], undisturbed: Path
) -> None:
    """Or since the beginning, where there is no checkpoint yet."""
    saved = f"checkpoints/global_step_{EVERY}/COMPLETE"
    early, later = Fault(Target("Agent", KILL), EVERY - 2, 0.0), Fault(Target("Agent", KILL), EVERY + 2, 0.0, saved)
    last = Fault(Target("Trainer-policy-0", KILL), 2 * EVERY + 2, 0.0)  # the checkpoint returned to is gone by then
    words = (f"checkpoint.every_steps={EVERY}", "checkpoint.keep_last=1")
    directory = disturbed(early, later, last, more=words)
    assert [line["step"] for line in metrics_of(directory)] == list(range(1, STEPS + 1))
    assert_same_model(directory, undisturbed)
    returned = [event["step"] for event in events_of(directory) if event["kind"] == "returned"]
    assert returned == [0, EVERY]
    assert kinds_of(directory).count("recovered") == 1
