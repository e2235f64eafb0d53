"""One `penstock run` over machines: it ends with the same bits as on one, and needs nothing of the driver's disk
elsewhere."""

import json
from pathlib import Path

import pytest

from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.models.model_files import INDEX, shard_name
from tests.machines.cluster import ROOT, machines
from tests.model_files import load_model
from tests.orchestrator.conftest import SMALL_MODEL

pytestmark = [pytest.mark.real, pytest.mark.machines]

MODEL = "/tmp/model"
"""The model, on the first machine alone, where the driver is."""
OWN_DISK = "/tmp/runs"
"""A folder for which the machines have disks of their own."""
CPUS = 1
"""CPUs of each machine, for a rank or an engine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the machines and this process share: prompts, and the run directories."""
    folder = tmp_path_factory.mktemp("runs")
    build_fresh_model(folder / "model", SMALL_MODEL, seed=3)
    lines = [json.dumps({"question": f"{i} and {i * i} are numbers", "answer": str(i)}) for i in range(64)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def cluster(warm_python, tmp_path_factory, folder):
    warm = Path(warm_python[0]).parent
    with machines(3, keep=[warm, tmp_path_factory.getbasetemp()]) as cluster:
        cluster.start_ray(num_cpus=CPUS, warm=warm)
        cluster[1].run(["cp", "-r", str(folder / "model"), MODEL])
        yield cluster


@pytest.fixture
def penstock_run(cluster, warm_python, folder):
    """`penstock run` on the first machine, with an engine that is exact; its directory."""

    def run(name, *words):
        cluster[1].run(
            [
                *warm_python, "-m", "penstock.cli.main", "run",
                f"model.path={MODEL}", f"data.path={folder}/prompts.jsonl", "rollout.max_model_len=64",
                "rollout.sampling.max_tokens=12", "reward.function=digits", "trainer.groups_per_step=4",
                "algorithm.group_size=4", "trainer.optimizer.lr=1e-3", "rollout.engine=hf", "trainer.max_steps=3",
                "trainer.num_threads=1", "rollout.num_threads=1", "reward.cpus_per_worker=0",
                f"output_dir={folder}", f"name={name}", *words,
            ],
            cwd=ROOT, timeout_s=900,
        )  # fmt: skip
        return folder / name

    return run


def events_of(directory, kind):
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == kind]


def places(directory):
    """The machine of each actor."""
    return events_of(directory, "placed")[0]["actors"]


def same_bits(one, other):
    expected, found = (load_model(directory / "model") for directory in (one, other))
    return expected.keys() == found.keys() and all(bool((expected[name] == found[name]).all()) for name in expected)


@pytest.mark.promise("4 spread")
@pytest.mark.parametrize(
    "expected",
    [
        {"Trainer-policy-0": "machine1", "Rollout-0": "machine2", "Rollout-1": "machine3"},
        {"Trainer-policy-0": "machine1", "Trainer-policy-1": "machine2", "Rollout-0": "machine3"},
    ],
)
def test_a_run_over_three_machines_ends_with_the_bits_of_one(penstock_run, expected):
    num_ranks = sum("Trainer" in name for name in expected)
    words = f"trainer.num_ranks={num_ranks}", f"rollout.num_workers={len(expected) - num_ranks}"
    alone = penstock_run(f"alone{num_ranks}", *words, "cluster.nodes=[machine1]", "cluster.cpus_per_worker=0")
    assert set(places(alone).values()) == {"machine1"}
    spread = penstock_run(f"spread{num_ranks}", *words, "store.inline_bytes=0")  # rows stay where they are written
    assert {name: places(spread)[name] for name in expected} == expected
    assert same_bits(alone, spread)
    assert not events_of(alone, "link")
    assert len({(link["source"], link["target"]) for link in events_of(spread, "link")}) == 3


def test_ranks_that_do_not_see_the_drivers_disk_save_there_and_go_on_from_there(cluster, penstock_run):
    words = ["trainer.num_ranks=2", "rollout.num_workers=1", "checkpoint.every_steps=1", f"output_dir={OWN_DISK}"]
    penstock_run("own", *words, "trainer.shard_size=1", "trainer.max_steps=2")
    penstock_run("own", *words, "trainer.max_steps=3", "resume=auto")
    lines = cluster[1].run(["cat", f"{OWN_DISK}/own/events.jsonl"]).stdout.splitlines()
    told = [(event["kind"], event.get("step")) for event in map(json.loads, lines) if "step" in event]
    assert told == [("checkpoint", 1), ("checkpoint", 2), ("resume", 2), ("checkpoint", 3)]
    model = set(cluster[1].run(["ls", f"{OWN_DISK}/own/model"]).stdout.split())
    assert model >= {INDEX, *(shard_name(number, 2) for number in (1, 2)), "config.json", "tokenizer.json"}
    assert cluster[2].run(["sh", "-c", f"ls -d {OWN_DISK} || true"]).stdout == ""


def test_nothing_is_left_on_any_machine(cluster):
    """After all the runs above, so that this test comes last."""
    for machine in cluster:
        left = machine.run(["sh", "-c", "ls -d /dev/shm/penstock-* /tmp/penstock-* 2>/dev/null || true"]).stdout
        assert not left, f"machine {machine.number}: {left}"
