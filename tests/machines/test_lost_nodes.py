"""A run goes on without a machine that has ranks of its trainer: they start elsewhere, from the copies of their state
that another machine has, and the weights are those of a run in which nothing was lost, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.bed import Machines
from tests.chaos.disturbance import Disturbed
from tests.chaos.plan import KILL, POWER, Fault, Target
from tests.machines.cluster import machines
from tests.machines.ray_nodes import SOON
from tests.model_files import load_model
from tests.run_files import events_of, metrics_of

pytestmark = [pytest.mark.real, pytest.mark.machines]

STEPS = 10


@pytest.mark.promise("4 machine lost")
def test_ranks_of_a_lost_machine_or_agent_go_on_elsewhere_with_the_same_bits(
    warm_python: list[str], small_run: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    warm, folder = Path(warm_python[0]).parent, tmp_path_factory.mktemp("lost_nodes")
    words = [
        *small_run, "rollout.engine=hf", "trainer.num_threads=1", "rollout.num_threads=1", "reward.cpus_per_worker=0",
        "trainer.num_ranks=2", "rollout.num_workers=1", f"trainer.max_steps={STEPS}", "checkpoint.every_steps=0",
        "faults.partner_share=1", "store.inline_bytes=0",
    ]  # fmt: skip
    with machines(3, keep=[warm, tmp_path_factory.getbasetemp()]) as cluster:
        cluster.start_ray(num_cpus=[1, 2, 2], warm=warm, environment=SOON)

        def go(name: str, more: list[str], faults: list[Fault]) -> list[dict[str, Any]]:
            run = Disturbed(Machines(cluster), warm_python, [*words, *more], folder / name)
            run.go(faults)
            return events_of(run.directory)

        go("alone", ["cluster.nodes=[machine1]", "cluster.cpus_per_worker=0"], [])
        agents = [f"Agent-{machine.address}" for machine in cluster]
        faults = [
            Fault(Target("Store", KILL), 1, 0.1),
            Fault(Target(agents[1], KILL), 2, 0.1),
            Fault(Target("2", POWER), 4, 0.1),
            Fault(Target(agents[2], KILL), 6, 0.1),
        ]
        events = go("lost", [], faults)

    def told(kind: str) -> list[dict[str, Any]]:
        return [event for event in events if event["kind"] == kind]

    (placed,) = told("placed")  # once: it has not begun anew
    assert placed["actors"]["Trainer-policy-0"] == placed["actors"]["Trainer-policy-1"] == "machine2"
    assert placed["actors"]["Rollout-0"] == "machine3"
    assert not [*told("returning"), *told("state_not_copied"), *told("state_not_kept")]
    assert len(told("node_left")) == 3  # of the second machine twice: its ranks had started there again
    assert {event["member"]: event["node"] for event in told("moved")}.keys() == {
        "Trainer-policy-0",
        "Trainer-policy-1",
    }
    assert {event["role"] for event in told("recovered")} >= {"trainer", "rollout"}
    assert [event["role"] for event in told("fault")].count("store") == 1, "it did not stay on the first machine"
    lines = metrics_of(folder / "lost")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["timing_s/partner"] > 0 for line in lines)
    expected, found = (load_model(folder / name / "model") for name in ("alone", "lost"))
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
