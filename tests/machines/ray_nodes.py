"""Ray on the machines of a cluster, by the commands that users type. Called by `Cluster.start_ray`."""

import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.machines.machine import Machine
from tests.warm_workers import EXECUTABLE

ROOT = Path(__file__).resolve().parents[2]
PORT = 6379
OBJECT_STORE_BYTES = 200 * 2**20
START_S = 180.0
TOKEN = "/tmp/ray_token"
"""Of each machine, in its own `/tmp`."""
QUIET = {
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
"""As the cluster of the other tests has it (`ray_cluster.py`)."""
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
    num_cpus: int | Sequence[int],
    warm: Path | None,
    environment: Mapping[str, str],
    options: Sequence[str],
    timeout_s: float,
) -> str:
    """Ray's head on the first machine, and the others join; the address, when all are there.

    Ray asks for a token, as it does where a user made one. What is run on the machines afterwards has it, and
    `RAY_ADDRESS`, in its environment.

    Args:
        num_cpus: of each machine, or of all alike, as Ray counts them.
        warm: folder of the tests' warm Python (`tests/warm_workers.py`), which must be among `keep`: Ray's workers are
            forks. None: they start as they do for users.
        environment: of Ray's processes, settings such as `RAY_health_check_period_ms`.
        options: more words for each `ray start`.
    """
    head, *others = members
    address = f"{head.address}:{PORT}"
    python: list[str | Path] = [sys.executable]
    settings = {**QUIET, **environment}
    if warm is not None:
        python = [warm / EXECUTABLE]
        settings |= {"RAY_START_HOOK": "tests.warm_workers.use_warm_workers"}
    token = secrets.token_hex(32)
    for member in members:
        member.run(["sh", "-c", f"umask 077 && cat >{TOKEN}"], input=token)
        member.environment |= {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": TOKEN, "RAY_ADDRESS": address, **settings,
        }  # fmt: skip
    at_head = ["--head", "--port", str(PORT), "--include-dashboard=false", "--node-ip-address", head.address]
    command = [*python, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats",
               "--object-store-memory", str(OBJECT_STORE_BYTES), *options]  # fmt: skip

    numbers = [num_cpus] * len(members) if isinstance(num_cpus, int) else list(num_cpus)
    head.run(
        [*command, "--num-cpus", str(numbers[0]), *at_head],
        cwd=ROOT,
        timeout_s=timeout_s,
    )
    joining = [
        member.start(
            [*command, "--num-cpus", str(number), "--address", address, "--node-ip-address", member.address],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for member, number in zip(others, numbers[1:], strict=True)
    ]
    for member, process in zip(others, joining, strict=True):
        said, _ = process.communicate(timeout=timeout_s)
        if process.returncode:
            raise RuntimeError(f"Ray did not start on machine {member.number}:\n{said}")
    head.run([*python, "-c", COUNT, address, str(len(members)), str(timeout_s)], cwd=ROOT, timeout_s=timeout_s + 30)
    return address
