"""Runs over three machines whose clocks are an hour apart, whose cables come out, and of which one loses its power,
while members die and hang at random moments: they end with the bits of a run on one machine. `make chaos` has more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.bed import Machines
from tests.chaos.checker import Promises, answers_of, broken
from tests.chaos.disturbance import Disturbed, Done
from tests.chaos.outcome import note
from tests.chaos.plan import COMMAND, CUT, IS_CHAOS, KILL, NET_S, POWER, SEEDS, STOP, Fault, Target, draw
from tests.machines.cluster import Cluster, machines
from tests.model_files import load_model
from tests.run_files import events_of
from tests.warm_workers import CLOCK_AHEAD_S

pytestmark = [pytest.mark.real, pytest.mark.machines]

QUICK_STEPS, STEPS = 4, 32
LAST_STEP = 24
"""Nothing happens after it, so that the run needs what it has lost once more."""
HEARTBEAT_S, START_S = 10.0, 60.0
NOTICED_S = (
    {KILL: 30.0, STOP: HEARTBEAT_S + 30.0, POWER: 60.0} if IS_CHAOS else dict.fromkeys((KILL, STOP, POWER), NET_S)
)
LOOKED_AFTER = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000" if IS_CHAOS else "5000",
    "RAY_health_check_failure_threshold": "8",
}
"""Ray looks after its nodes more often than it does for users: one without power is gone after ten to twenty seconds
(forty where other tests keep the machine busy), and one whose cable is out for five is not."""
WATCHED = [
    "checkpoint.every_steps=2", "tracking.samples_every_steps=1", "faults.heartbeat_s=0.5",
    f"faults.heartbeat_timeout_s={HEARTBEAT_S:g}", "faults.max_restarts=1000", "faults.max_returns=1000",
    "faults.pause_s=0.1", "faults.window_s=5", f"rollout.start_timeout_s={START_S:g}",
    f"cluster.files_timeout_s={START_S:g}",
]  # fmt: skip
MORE = [
    Target("Prompts", KILL), Target("Compute-group_advantage", KILL), Target("Store", KILL), Target("Agent", KILL),
    Target("Agent", STOP),
]  # fmt: skip
"""Faults for `make chaos` only: `test_one_machine.py` has them, too."""


@dataclass(frozen=True)
class Layout:
    """Who is where."""

    cpus: list[int]
    """CPUs of each machine."""
    words: list[str]
    places: dict[str, str]
    targets: list[Target]
    power: int
    """The machine that is lost for good."""


LAYOUTS = [
    Layout(
        [2, 2, 2],
        ["rollout.num_workers=2", "store.inline_bytes=0"],
        {"Trainer-policy-0": "machine1", "Rollout-0": "machine2", "Rollout-1": "machine3"},
        [
            *(Target(who, KILL) for who in ("Rollout-0", "Rollout-1", "Reward-0", "Trainer-policy-0")),
            Target("Rollout-1", STOP), Target("2", CUT), Target("3", CUT), Target(COMMAND, KILL),
        ],
        3,
    ),
    Layout(
        [1, 2, 2],
        ["rollout.num_workers=1", "trainer.num_ranks=2", "store.inline_bytes=0", "faults.partner_share=1"],
        {"Trainer-policy-0": "machine2", "Trainer-policy-1": "machine2", "Rollout-0": "machine3"},
        [
            *(Target(who, KILL) for who in ("Rollout-0", "Reward-0", "Trainer-policy-0", "Trainer-policy-1")),
            Target("Trainer-policy-1", STOP), Target("2", CUT), Target("3", CUT), Target(COMMAND, KILL),
        ],
        2,
    ),
]  # fmt: skip
"""Layouts, used in turn. The second is for `make chaos` only: `tests/machines/test_lost_nodes.py` tests its main
point."""
Go = Callable[..., tuple[Path, list[Done]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moments")


@pytest.fixture
def layout(seed: int) -> Layout:
    return LAYOUTS[seed % len(LAYOUTS)]


@pytest.fixture
def cluster(warm_python: list[str], layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    warm = Path(warm_python[0]).parent
    with machines(3, keep=[warm, tmp_path_factory.getbasetemp()]) as cluster:
        cluster[3].environment[CLOCK_AHEAD_S] = "3600"
        cluster.start_ray(num_cpus=layout.cpus, warm=warm, environment=LOOKED_AFTER)
        yield cluster


@pytest.fixture
def go(cluster: Cluster, warm_python: list[str], small_run: list[str], folder: Path) -> Go:
    """A run through these faults; its directory, and what was done."""

    def gone(name: str, num_steps: int, words: Sequence[str], faults: Sequence[Fault] = ()) -> tuple[Path, list[Done]]:
        all_words = [
            *small_run, "rollout.engine=hf", "trainer.num_threads=1", "rollout.num_threads=1",
            "reward.cpus_per_worker=0", f"trainer.max_steps={num_steps}", *words,
        ]  # fmt: skip
        run = Disturbed(Machines(cluster), warm_python, all_words, folder / name, retries=20)
        return run.directory, run.go(faults)

    return gone


@pytest.mark.parametrize("seed", SEEDS)
def test_clocks_cables_power_and_members_change_no_bit(seed: int, layout: Layout, go: Go, folder: Path) -> None:
    alone = folder / f"alone-{LAYOUTS.index(layout)}"
    if not alone.exists():
        go(alone.name, STEPS, [*layout.words, "cluster.nodes=[machine1]", "cluster.cpus_per_worker=0"])
    spread, done = go(f"spread-{seed}", QUICK_STEPS, [*layout.words, WATCHED[0]], [Fault(Target("2", CUT), 1, 0.0)])
    events = events_of(spread)
    placed = next(event["actors"] for event in events if event["kind"] == "placed")
    assert {name: placed[name] for name in layout.places} == layout.places
    assert not [event for event in events if event["kind"] in ("fault", "returned")], "a cable was out for seconds"

    targets = [*layout.targets, *MORE] if len(SEEDS) > 1 else layout.targets
    faults = draw(seed, targets, LAST_STEP, last=[Target(str(layout.power), POWER)])
    chaos, done = go(f"chaos-{seed}", STEPS, [*layout.words, *WATCHED], faults)
    note(answers_of(chaos, done))
    assert not broken(chaos, Promises(STEPS, 4, 4, 0, NOTICED_S, START_S), done), done
    events = events_of(chaos)
    kinds = {event["kind"] for event in events}
    last = [event["actors"] for event in events if event["kind"] == "placed"][-1]
    left = {"machine1", "machine2", "machine3"} - {f"machine{layout.power}"}
    assert "node_left" in kinds or set(last.values()) == left, "a machine has lost its power"
    expected, found = (load_model(one / "model") for one in (alone, chaos))
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
