"""Ray on machines: a cluster as users make it, but that its workers start quickly."""

import importlib.util
import json
import subprocess
import time

import pytest

from tests.machines.namespaces import CommandFailed

pytestmark = [pytest.mark.real, pytest.mark.machines]

HAS_VLLM = importlib.util.find_spec("vllm") is not None
DRIVER = """
import json, os, socket, sys
import ray

ray.init(log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=3)  # of 4: one fits on a machine
class Actor:
    def facts(self):
        return socket.gethostname(), ray.util.get_node_ip_address(), "vllm.v1.engine.core" in sys.modules, os.getpid()

actors = [Actor.remote() for _ in range(2)]
facts = sorted(ray.get([actor.facts.remote() for actor in actors]))
nodes = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
print(json.dumps({"driver": ray.util.get_node_ip_address(), "nodes": nodes, "actors": facts}), flush=True)
sys.stdin.readline()
"""


def test_machines_form_one_cluster_whose_workers_are_forks(ray_machines, warm_python) -> None:
    said = json.loads(ray_machines[2].run([*warm_python, "-c", DRIVER], timeout_s=900).stdout)
    assert said["driver"] == "10.77.0.2"
    assert said["nodes"] == ["10.77.0.1", "10.77.0.2"]
    on_each = [["machine1", "10.77.0.1", HAS_VLLM], ["machine2", "10.77.0.2", HAS_VLLM]]
    assert [facts[:3] for facts in said["actors"]] == on_each


@pytest.mark.parametrize("environment", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "of-another-cluster"}])
def test_a_connection_without_the_clusters_token_is_refused(ray_machines, warm_python, environment) -> None:
    status = [*warm_python, "-m", "ray.scripts.scripts", "status"]
    with pytest.raises(CommandFailed, match="InvalidAuthToken"):
        ray_machines[2].run(status, env=environment)
    deadline = time.monotonic() + 300  # a node that is just there has not told what it has
    while "/8.0 CPU" not in (told := ray_machines[2].run(status).stdout):
        assert time.monotonic() < deadline, told


def test_workers_end_with_their_node(ray_machines, warm_python) -> None:
    """The last one here: a machine has lost its node."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ray_machines[1].start([*warm_python, "-c", DRIVER], **pipes) as driver:
        [_, (hostname, *_, worker)] = json.loads(driver.stdout.readline())["actors"]
        assert hostname == "machine2"
        ray_machines[2].run(["pkill", "-KILL", "raylet"])
        deadline = time.monotonic() + 300
        while ray_machines[2].run(["test", "-e", f"/proc/{worker}"], check=False).returncode == 0:
            assert time.monotonic() < deadline
        driver.kill()
