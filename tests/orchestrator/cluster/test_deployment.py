"""The files of docs/deployment.md: the Slurm job calls what it should, and the Kubernetes one has KubeRay's fields."""

import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.orchestrator.configuration.compose import load_config

DOCS = Path(__file__).parents[3] / "docs"
RAY_JOB = {"entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit", "rayClusterSpec"}
HEAD, WORKERS = {"rayStartParams", "template"}, {"groupName", "replicas", "minReplicas", "maxReplicas"}
CONTAINER = {"name", "image", "resources", "volumeMounts"}
STAND_INS = {
    "scontrol": 'echo "$1 $2 $3" >>"$TOLD"; printf "gpu-07\\ngpu-08\\n"',
    "hostname": "echo 10.0.0.7 fe80::7",
    "ray": """echo "ray $*" >>"$TOLD"
[ "$1" = symmetric-run ] || exit 0
while [ "$1" != -- ]; do shift; done
shift; "$@\"""",
    "penstock": 'echo "penstock $* at $RAY_ADDRESS with $RAY_AUTH_MODE" >>"$TOLD"',
    "srun": 'echo "srun $*" >>"$TOLD"; while [ "${1#--}" != "$1" ]; do shift; done; "$@"',
}


@pytest.fixture
def told(tmp_path: Path) -> list[str]:
    """What the job calls, on an allocation of two nodes."""
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name, script in STAND_INS.items():
        (scripts / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (scripts / name).chmod(0o755)
    (scripts / "activate").write_text(f'export PATH="{scripts}:$PATH"\n')
    environment = {
        "PATH": f"{scripts}:{os.environ['PATH']}", "HOME": str(tmp_path), "PENSTOCK": str(tmp_path),
        "TOLD": str(tmp_path / "told"), "SLURM_JOB_NODELIST": "gpu-[07-08]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "31",
    }  # fmt: skip
    command = [str(DOCS / "deploy" / "slurm.sh"), "recipe=gsm8k", "name=a run"]
    subprocess.run(command, env=environment, check=True, timeout=60)
    return (tmp_path / "told").read_text().splitlines()


@pytest.mark.real
def test_the_slurm_job_starts_ray_on_all_nodes_and_the_run_on_the_first(told: list[str]) -> None:
    assert told[0] == "ray get-auth-token --generate"
    assert "show hostnames gpu-[07-08]" in told
    assert "srun --nodes=1 --ntasks=1 --nodelist=gpu-07 hostname --ip-address" in told
    (started,) = [line for line in told if line.startswith("ray symmetric-run")]
    assert started.startswith(
        "ray symmetric-run --address 10.0.0.7:20031 --min-nodes 2 -- env RAY_ADDRESS=10.0.0.7:20031"
    )
    assert told[-1] == "penstock run resume=auto recipe=gsm8k name=a run at 10.0.0.7:20031 with token"


def test_the_directives_of_the_slurm_job_are_slurms() -> None:
    script = (DOCS / "deploy" / "slurm.sh").read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert set(directives) == {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "time", "requeue",
    }  # fmt: skip
    assert directives["ntasks-per-node"] == "1"


def test_the_fields_of_the_kubernetes_job_are_kuberays() -> None:
    job: dict[str, Any] = yaml.safe_load((DOCS / "deploy" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert set(spec) == RAY_JOB
    cluster = spec["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert cluster["rayVersion"] == version("ray")
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert [set(group) for group in groups] == [HEAD, HEAD | WORKERS]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert set(container) == CONTAINER
        assert container["resources"]["limits"] == container["resources"]["requests"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
        assert set(volumes) == set(mounted)
        assert mounted["shm"] == "/dev/shm"
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def test_the_kubernetes_job_starts_a_run_that_can_be_configured() -> None:
    job = yaml.safe_load((DOCS / "deploy" / "rayjob.yaml").read_text())
    program, command, *words = job["spec"]["entrypoint"].split()
    assert (program, command) == ("penstock", "run")
    config = load_config(words)
    assert (config.resume, config.output_dir) == ("auto", "/runs")
