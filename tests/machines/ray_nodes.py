"""Ray on the machines of a cluster, by the commands that users type."""

import secrets
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.machines.machine import Machine
from tests.warm_workers import EXECUTABLE

ROOT = Path(__file__).resolve().parents[2]
PORT = 6379
OBJECT_STORE_BYTES = 200 * 2**20
START_S = 900.0
TOKEN = "/tmp/ray_token"
"""File with Ray's token on each machine, in the machine's own `/tmp`."""
RAY = ("-m", "ray.scripts.scripts")
"""What the command `ray` runs."""
HEAD = ("--head", "--port", str(PORT))
WITHOUT_JOBS, WITH_JOBS = ("--include-dashboard=false",), ("--include-dashboard=true", "--dashboard-host=0.0.0.0")
QUIET = {
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
"""Settings that the cluster of the other tests has as well (`ray_cluster.py`)."""
SOON = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
}
"""Settings of a head that takes a machine without power for dead after twenty seconds, instead of a minute. A machine
that is only busy answers sooner."""
COUNT = """
import sys, time
from ray._raylet import GcsClient
wanted, deadline = int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while (found := sum(node.state == 0 for node in GcsClient(sys.argv[1]).get_all_node_info().values())) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"only {found} of {wanted} Ray nodes are there")
    time.sleep(0.05)
"""
"""A program: wait until so many Ray nodes are alive. State 0 is ALIVE."""


def start(
    members: Sequence[Machine],
    nodes: Sequence[tuple[Machine, int, int]],
    warm: Path | None,
    environment: Mapping[str, str],
    timeout_s: float,
    takes_jobs: bool = False,
    store_bytes: int = OBJECT_STORE_BYTES,
    head_options: Sequence[str] = (),
) -> str:
    """See `Cluster.start_ray`. `nodes`: those of the members that become nodes, with their CPUs and GPUs."""
    address = f"{members[0].address}:{PORT}"
    python: list[str | Path] = [sys.executable]
    settings = {**QUIET, **environment}
    if warm is not None:
        python = [warm / EXECUTABLE]
        settings["RAY_START_HOOK"] = "tests.warm_workers.use_warm_workers"
    token = secrets.token_hex(32)
    for member in members:
        member.run(["sh", "-c", f"umask 077 && cat >{TOKEN}"], input=token)
        member.environment |= {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": TOKEN, "RAY_ADDRESS": address, **settings,
        }  # fmt: skip

    def start_node(member: Machine, cpus: int, gpus: int) -> None:
        is_head, jobs = member is members[0], WITH_JOBS if takes_jobs else WITHOUT_JOBS
        role = (*HEAD, *jobs, *head_options) if is_head else ("--address", address)
        counts = ["--num-cpus", str(cpus), "--num-gpus", str(gpus), "--object-store-memory", str(store_bytes)]
        command = [*python, *RAY, "start", *role, "--node-ip-address", member.address, *counts, "--disable-usage-stats"]
        member.run(command, cwd=ROOT, timeout_s=timeout_s)

    head, *others = nodes
    start_node(*head)
    with ThreadPoolExecutor() as pool:
        for joining in [pool.submit(start_node, *other) for other in others]:
            joining.result()
    count = [*python, "-c", COUNT, address, str(len(nodes)), str(timeout_s)]
    members[0].run(count, cwd=ROOT, timeout_s=2 * timeout_s)
    return address
