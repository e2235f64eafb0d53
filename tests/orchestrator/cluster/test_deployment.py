"""The files of docs/deploy: their fields are those of Slurm, KubeRay and SkyPilot, and their commands can be given."""

import os
import re
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.main import make_parser
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config

DEPLOY = Path(__file__).parents[3] / "docs" / "deploy"
CLUSTER = "rayClusterSpec"
FIELDS = {
    "entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", f"{CLUSTER}.rayVersion",
    f"{CLUSTER}.authOptions.mode", f"{CLUSTER}.enableInTreeAutoscaling", f"{CLUSTER}.autoscalerOptions.version",
    f"{CLUSTER}.autoscalerOptions.idleTimeoutSeconds", f"{CLUSTER}.headGroupSpec.rayStartParams",
    f"{CLUSTER}.headGroupSpec.template", f"{CLUSTER}.workerGroupSpecs.groupName",
    f"{CLUSTER}.workerGroupSpecs.replicas", f"{CLUSTER}.workerGroupSpecs.minReplicas",
    f"{CLUSTER}.workerGroupSpecs.maxReplicas",
    f"{CLUSTER}.workerGroupSpecs.rayStartParams", f"{CLUSTER}.workerGroupSpecs.template",
}  # fmt: skip
"""Fields of a RayJob that the files may use, by `helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml` of KubeRay
1.5.1, 1.6.2 and 1.7.0. Below `template` are fields of Kubernetes."""
TASK = {"name", "num_nodes", "resources", "workdir", "file_mounts", "envs", "secrets", "setup", "run"}
RESOURCES = {"accelerators", "use_spot", "disk_size"}
"""Fields of a task of SkyPilot, by `sky.utils.schemas` of 0.14.1."""
STAND_INS = {
    "scontrol": 'echo "scontrol $*" >>"$TOLD"',
    "getent": 'printf "127.0.1.1 here\\n10.0.0.7 here\\n10.1.0.7 here\\n"',
    "ray": 'echo "ray $*" >>"$TOLD"',
    "penstock": """echo "penstock $* at $RAY_ADDRESS with $RAY_AUTH_MODE" >>"$TOLD"
[ "${SIGNALLED:-}" ] || exit 3
trap 'echo checkpoint >>"$TOLD"; exit 130' TERM
kill -USR1 "$PPID"
while true; do read -rt 1 <>"$TOLD.wait" || true; done""",
    "srun": 'echo "srun $1" >>"$TOLD"; shift; SLURM_PROCID=$RANK "$@"; echo >"$STARTED"',
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def job() -> dict[str, Any]:
    return next(document for document in documents("rayjob.yaml") if document["kind"] == "RayJob")


def job_that_scales() -> dict[str, Any]:
    """The job with the operations of kustomization.yaml done."""
    (kustomization,) = documents("kustomization.yaml")
    assert kustomization["resources"] == ["rayjob.yaml"]
    (patch,) = kustomization["patches"]
    patched = job()
    assert patch["target"] == {"kind": patched["kind"], "name": patched["metadata"]["name"]}
    for operation in yaml.safe_load(patch["patch"]):
        *way, last = operation["path"].split("/")[1:]
        place: Any = patched
        for step in way:
            place = place[int(step) if isinstance(place, list) else step]
        assert (last in place) == (operation["op"] == "replace")
        place[last] = operation["value"]
    return patched


def fields_of(found: Any, where: str = "") -> set[str]:
    """Paths of the fields that hold values, as in `FIELDS`."""
    if isinstance(found, list):
        return {field for item in found for field in fields_of(item, where)}
    if not isinstance(found, dict) or where.endswith((".template", ".rayStartParams")):
        return {where}
    return {field for name, value in found.items() for field in fields_of(value, f"{where}.{name}".strip("."))}


def config_of(command: str) -> RunConfig:
    """Configuration of a `penstock run` in a script."""
    words = shlex.split(command.replace('"$@" &', "name=first"), comments=True)
    assert words.pop(0) == "penstock"
    return load_config(make_parser().parse_args(words).overrides)


def line_of(script: str, start: str) -> str:
    return next(line.strip() for line in script.splitlines() if line.strip().startswith(start))


@pytest.mark.parametrize("made", [job, job_that_scales])
def test_the_fields_of_the_kubernetes_jobs_are_kuberays(made: Any) -> None:
    found = made()
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    assert fields_of(found["spec"]) <= FIELDS
    cluster = found["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == version("ray")
    assert cluster["authOptions"] == {"mode": "token"}


def test_each_pod_has_shared_memory_that_its_limit_holds() -> None:
    cluster = job()["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(volumes) == set(mounted)
        assert mounted["shm"] == "/dev/shm"
        shared = volumes["shm"]["emptyDir"]
        assert shared["medium"] == "Memory"
        size, limit = shared["sizeLimit"], container["resources"]["limits"]["memory"]
        assert 0 < 2 * int(size.removesuffix("Gi")) < int(limit.removesuffix("Gi"))


def test_pods_share_a_volume_that_many_may_mount() -> None:
    (claim,) = [document for document in documents("rayjob.yaml") if document["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    cluster = job()["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        volumes = group["template"]["spec"]["volumes"]
        assert {"claimName": claim["metadata"]["name"]} in [volume.get("persistentVolumeClaim") for volume in volumes]


def test_the_kubernetes_jobs_start_runs_that_can_be_configured() -> None:
    config = config_of(job()["spec"]["entrypoint"])
    assert (config.resume, config.output_dir, config.cluster.wait_s) == ("auto", "/runs", 1800)
    config = config_of(job_that_scales()["spec"]["entrypoint"])
    assert (config.rollout.num_workers, config.cluster.wait_s) == ("auto", 1800)
    (workers,) = job_that_scales()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"]) == (0, 0)
    assert config.rollout.max_workers is not None
    assert config.rollout.max_workers < 8 * workers["maxReplicas"]


def test_the_image_has_what_kuberay_and_triton_call() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (installed,) = re.findall(r"apt-get install -y --no-install-recommends (.+?) &&", text)
    assert {"g++", "wget", "git", "make", "libnuma1"} <= set(installed.split())
    assert line_of(text, "FROM ") == "FROM python:3.11-bookworm"  # the Python that requirements/gpu.lock is for


def test_the_task_of_skypilot_has_its_fields_and_a_run_that_can_be_configured() -> None:
    (task,) = documents("skypilot.yaml")
    assert set(task) <= TASK
    assert set(task["resources"]) <= RESOURCES
    config = config_of(line_of(task["run"], "penstock run"))
    assert (config.resume, config.output_dir) == ("auto", "s3://BUCKET/runs")


def test_the_directives_of_the_slurm_job_are_slurms() -> None:
    script = (DEPLOY / "slurm.sh").read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert set(directives) == {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "mem", "time", "signal", "requeue",
        "open-mode",
    }  # fmt: skip
    assert (directives["ntasks-per-node"], directives["mem"]) == ("1", "0")


def test_the_slurm_job_signals_itself_before_the_run_has_to_be_ready() -> None:
    script = (DEPLOY / "slurm.sh").read_text()
    (before_s,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    config = config_of(line_of(script, "penstock run"))
    assert config.resume == "auto"
    assert 0 < config.faults.preemption_s < int(before_s)


def told(tmp_path: Path, signalled: str = "", rank: str = "0") -> list[str]:
    """What the job calls, with stand-ins for the commands of Slurm, Ray and Penstock."""
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name, script in STAND_INS.items():
        (scripts / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (scripts / name).chmod(0o755)
    (scripts / "activate").write_text(f'export PATH="{scripts}:$PATH"\n')
    for pipe in ("told.wait", "started"):
        os.mkfifo(tmp_path / pipe)
    environment = {
        "PATH": f"{scripts}:{os.environ['PATH']}", "HOME": str(tmp_path), "PENSTOCK": str(tmp_path), "RANK": rank,
        "TOLD": str(tmp_path / "told"), "STARTED": str(tmp_path / "started"), "SIGNALLED": signalled,
        "SLURM_JOB_ID": "31", "SLURM_CPUS_ON_NODE": "64",
    }  # fmt: skip
    command = f'bash {DEPLOY}/slurm.sh recipe=gsm8k "name=a run"; status=$?; read -r <"$STARTED"; exit $status'
    status = subprocess.run(["bash", "-c", command], env=environment, timeout=900, check=False).returncode
    assert status == (130 if signalled else 3)
    return (tmp_path / "told").read_text().splitlines()


RUN = (
    "penstock run cluster.wait_s=600 faults.preemption_s=150 resume=auto recipe=gsm8k name=a run at 10.0.0.7:20031 "
    "with token"
)


@pytest.mark.real
@pytest.mark.parametrize(("rank", "role"), [("0", "--head --port=20031"), ("1", "--address=10.0.0.7:20031")])
def test_the_slurm_job_starts_ray_on_all_nodes_and_the_run_on_the_first(tmp_path: Path, rank: str, role: str) -> None:
    calls = told(tmp_path, rank=rank)
    assert calls[0] == "ray get-auth-token --generate"
    assert "srun --cpu-bind=none" in calls
    assert f"ray start --block {role} --node-ip-address=10.0.0.7 --num-cpus=64" in calls
    assert calls.index("ray health-check --address 10.0.0.7:20031") < calls.index(RUN)
    assert not any(call.startswith("scontrol") for call in calls)
    assert not Path("/tmp/ray-31").exists()


@pytest.mark.real
def test_a_slurm_job_at_its_time_limit_takes_a_checkpoint_and_is_queued_again(tmp_path: Path) -> None:
    calls = told(tmp_path, signalled="yes")
    assert calls.index(RUN) < calls.index("checkpoint") < calls.index("scontrol requeue 31")
