"""Runs on a cluster whose nodes come when they are asked for, and go when they are idle. It is Ray's own fake
autoscaler, whose nodes are processes of one machine."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.machines.cluster import ROOT, machines
from tests.machines.machine import Machine
from tests.machines.ray_nodes import RAY
from tests.run_files import events_of, metrics_of

pytestmark = [pytest.mark.real, pytest.mark.machines]

NODE_CPUS, MOST_NODES = 2, 2
AUTOSCALER = {
    "cluster_name": "fake", "max_workers": MOST_NODES, "upscaling_speed": 1.0, "idle_timeout_minutes": 0.2,
    "provider": {
        "type": "external", "module": "tests.machines.warm_nodes.WarmNodes", "foreground_node_launch": True,
        "use_node_id_as_ip": True, "worker_rpc_drain": True, "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": NODE_CPUS, "object_store_memory": 10**8},
            "node_config": {}, "min_workers": 0, "max_workers": MOST_NODES,
        },
    },
    "head_node_type": "ray.head.default", "auth": {"ssh_user": "nobody"}, "docker": {},
    "file_mounts": {}, "cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": [],
    "rsync_filter": [], "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
    "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
}  # fmt: skip
"""Configuration of a head without CPUs."""
HOLDER = """
import logging, os, sys
import ray
from penstock.orchestrator.cluster.placement.reservation import Reservation
from tests.orchestrator.cluster.placement.clusters import planned
logging.basicConfig(format="%(message)s")
ray.init(os.environ["RAY_ADDRESS"], logging_level="ERROR")
actors, config = planned("cluster.wait_s=900", "reward.cpus_per_worker=0", "cluster.cpus_per_worker=2")
reserved = Reservation.make(actors, config, f"penstock-{sys.argv[1]}-0123abcd-00000000", 900)
print("has room", flush=True)
sys.stdin.read()
"""
"""A run that reserves all nodes of the largest cluster until its input ends."""
REWARD = '''
import os, time


def digits(response, task, slow_while):
    """Slow while that file is there."""
    if os.path.exists(slow_while):
        time.sleep(0.5)
    return sum(character in "0123456789" for character in response) / len(response) if response else 0.0
'''


@pytest.fixture(scope="module")
def head(warm_python: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    warm, base = Path(warm_python[0]).parent, tmp_path_factory.getbasetemp()
    file = tmp_path_factory.mktemp("autoscaler") / "cluster.json"
    file.write_text(json.dumps(AUTOSCALER))
    with machines(1, keep=[warm, base]) as cluster:
        cluster.start_ray(
            num_cpus=0, warm=warm, head_options=["--autoscaling-config", str(file)],
            environment={"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        yield cluster[1]


def wait_for(found: Callable[[], Any], seconds: float = 900) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return answer


def says(run: "subprocess.Popen[str]", log: Path, text: str) -> bool:
    assert run.poll() is None, log.read_text()
    return text in log.read_text()


def status(head: Machine, python: list[str]) -> str:
    """What `ray status` prints."""
    return head.run([*python, *RAY, "status"], cwd=ROOT, timeout_s=300).stdout


def has_no_workers(head: Machine, python: list[str]) -> bool:
    _, is_shown, usage = status(head, python).partition("Total Usage")
    return bool(is_shown) and "CPU" not in usage


def holder(head: Machine, python: list[str], name: str, log: Path) -> "subprocess.Popen[str]":
    with log.open("w") as file:
        return head.start(
            [*python, "-c", HOLDER, name], cwd=ROOT, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT
        )


def test_runs_that_wait_for_nodes_have_them_in_the_order_in_which_they_came(
    head: Machine, warm_python: list[str], tmp_path: Path
) -> None:
    logs = {name: tmp_path / name for name in ("holds", "first", "second")}
    runs = {"holds": holder(head, warm_python, "holds", logs["holds"])}
    wait_for(partial(says, runs["holds"], logs["holds"], "has room"))
    for name in ("first", "second"):
        runs[name] = holder(head, warm_python, name, logs[name])
        wait_for(partial(says, runs[name], logs[name], "waiting up to 900 s (cluster.wait_s) for 4 CPU(s)"))
    assert says(runs["first"], logs["first"], "Run holds (0123abcd) has 2 CPU(s) on")
    assert says(runs["second"], logs["second"], "behind Run first (0123abcd)")
    wait_for(lambda: "{'CPU': 2.0} * 2 (PACK): 2+ pending placement groups" in status(head, warm_python))
    runs["holds"].communicate()
    wait_for(partial(says, runs["first"], logs["first"], "has room"))
    assert not says(runs["second"], logs["second"], "has room")
    runs["first"].communicate()
    wait_for(partial(says, runs["second"], logs["second"], "has room"))
    runs["second"].communicate()


def test_a_node_that_never_comes_ends_the_run_with_a_sentence(
    head: Machine, warm_python: list[str], small_run: list[str], tmp_path: Path
) -> None:
    command = [*warm_python, "-m", "penstock.cli.main", "run", *small_run, "rollout.engine=hf"]
    words = [f"output_dir={tmp_path}", f"cluster.cpus_per_worker={NODE_CPUS + 1}", "cluster.wait_s=5"]
    done = head.run([*command, *words], cwd=ROOT, timeout_s=900, check=False)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, said
    assert "was not free within 5 s (cluster.wait_s)" in said
    assert "No node came that has room for it." in said
    wait_for(lambda: "pending placement groups" not in status(head, warm_python))  # the request is taken back


def test_a_run_starts_without_nodes_grows_under_load_and_gives_all_back(
    head: Machine, warm_python: list[str], small_run: list[str], tmp_path: Path
) -> None:
    slow_while, directory = tmp_path / "slow", tmp_path / "grows"
    slow_while.touch()
    wait_for(partial(has_no_workers, head, warm_python))
    (tmp_path / "slow.py").write_text(REWARD)
    run = head.start(
        [
            *warm_python, "-m", "penstock.cli.main", "run", *small_run, "rollout.engine=hf", "name=grows",
            "reward.cpus_per_worker=0", f"reward.function={tmp_path}/slow.py:digits",
            f"reward.options={{slow_while: {slow_while}}}", "trainer.max_steps=40", f"output_dir={tmp_path}",
            "cluster.wait_s=900", "rollout.num_workers=auto", f"rollout.max_workers={NODE_CPUS}",
        ],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip

    def joined() -> list[dict[str, Any]]:
        assert run.poll() is None, run.communicate()[0][-3000:]
        there = (directory / "events.jsonl").exists()
        return [event for event in events_of(directory) if event["kind"] == "joined"] if there else []

    assert [event["member"] for event in wait_for(joined)] == ["Rollout-1"]
    slow_while.unlink()
    output, _ = run.communicate(timeout=900)
    assert run.returncode == 0, output[-3000:]
    assert "waiting up to 900 s (cluster.wait_s) for 2 CPU(s)" in output
    lines = metrics_of(directory)
    assert (lines[0]["rollout/num_engines"], lines[-1]["rollout/num_engines"]) == (1, 2)
    wait_for(partial(has_no_workers, head, warm_python))
