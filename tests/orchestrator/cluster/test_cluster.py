"""What Ray leaves open on a machine, and Penstock does not."""

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private.ray_constants import KV_NAMESPACE_JOB
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.utils import check_version_info
from ray.dashboard.modules.job.common import JOB_ID_METADATA_KEY, JobInfo, JobInfoStorageClient, JobStatus
from ray.exceptions import AuthenticationError

from penstock.conf.errors import RayEnded, ResourceError
from penstock.orchestrator.cluster import ray_cluster
from penstock.orchestrator.cluster.local_ray import short_paths
from penstock.orchestrator.cluster.ray_cluster import join, while_it_lives
from penstock.orchestrator.cluster.ray_connection import keep_token_private


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".ray" / "auth_token"


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_a_token_is_made_that_its_user_alone_can_read_and_stays(token: Path) -> None:
    keep_token_private()
    made = token.read_text()
    assert (mode_of(token), len(made)) == (0o600, 64)
    keep_token_private()
    assert token.read_text() == made
    assert os.listdir(token.parent) == ["auth_token"]


def test_one_that_others_can_read_is_closed_to_them(token: Path) -> None:
    token.parent.mkdir()
    token.write_text("of ray")
    token.chmod(0o644)
    keep_token_private()
    assert (mode_of(token), token.read_text()) == (0o600, "of ray")


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "x"), ("RAY_AUTH_TOKEN_PATH", "/x")]
)
def test_none_is_made_where_another_or_none_is_wanted(
    token: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    keep_token_private()
    assert not token.exists()


def test_no_token_is_made_for_a_cluster_of_others(token: Path) -> None:
    keep_token_private(is_joining=True)
    assert not token.exists()


def test_without_a_home_that_can_be_written_to_a_process_has_a_token_of_its_own(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token.parent.write_text("a file")
    keep_token_private(is_joining=True)
    assert "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")  # is taken back after the test
    keep_token_private()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_sockets_are_where_the_kernel_takes_their_paths() -> None:
    assert short_paths({}) == short_paths({"TMPDIR": "/scratch/alice/tmp"}) == {}
    assert short_paths({"TMPDIR": "/scratch/" + "a" * 30}) == {}
    long = "/scratch/" + "a" * 31
    assert short_paths({"TMPDIR": long}) == {"RAY_TMPDIR": "/tmp", "VLLM_RPC_BASE_PATH": "/tmp"}
    assert short_paths({"TMPDIR": long, "RAY_TMPDIR": "/scratch"}) == {}
    with pytest.raises(ResourceError, match="Set RAY_TMPDIR to a directory of at most 39 bytes"):
        short_paths({"RAY_TMPDIR": long})


def test_who_has_another_version_of_ray_is_asked_to_install_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"ray_version": "2.1.0", "python_version": "3.7.0"}
    monkeypatch.setattr(ray_cluster, "reach", lambda address: None)
    monkeypatch.setattr("ray.init", lambda **_: check_version_info(theirs, "node 10.0.0.2"))
    with pytest.raises(ResourceError, match=r"Ray: 2\.1\.0 .*\)\. Install the cluster's versions here\."):
        join("10.0.0.1:6379")


class KeyValues:
    """Ray's store of jobs, in memory."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self._values = values

    def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes | None:
        return self._values.get(key) if namespace == KV_NAMESPACE_JOB else None

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes, timeout: float) -> None:
        assert (overwrite, namespace) == (True, KV_NAMESPACE_JOB)
        self._values[key] = value


@pytest.mark.parametrize("given", [None, {"team": "red", "penstock.run": "mine"}])
def test_a_job_of_ray_job_submit_has_the_texts_of_its_run(
    given: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id="raysubmit_1").encode()
    submitted = JobInfo(JobStatus.RUNNING, entrypoint="penstock run", start_time=1, metadata=given)
    values = {key: json.dumps(submitted.to_json()).encode()}
    monkeypatch.setattr(ray_cluster, "GcsClient", lambda address: KeyValues(values))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379"))
    ray_cluster.add_to_submission({"penstock.run": "sums"})
    assert values == {key: json.dumps(submitted.to_json()).encode()}, "this process is in no job"
    ours = {"metadata": {JOB_ID_METADATA_KEY: "raysubmit_1"}}
    monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps(ours))
    ray_cluster.add_to_submission({"penstock.run": "sums", "penstock.algorithm": "grpo"})
    found = JobInfo.from_json(json.loads(values[key]))
    assert found.metadata == {"penstock.run": "sums", "penstock.algorithm": "grpo"} | (given or {})
    assert (found.status, found.entrypoint, found.start_time) == (JobStatus.RUNNING, "penstock run", 1)


@pytest.mark.parametrize(
    ("said", "raised", "message"),
    [
        ("RPC error: WrongClusterID: Perhaps the client is accessing GCS", RayEnded, "started anew .* resume=auto"),
        ("RPC error: InvalidAuthToken", AuthenticationError, "InvalidAuthToken"),
    ],
)
def test_a_head_that_has_started_anew_is_named(said: str, raised: type[Exception], message: str) -> None:
    def call() -> None:
        raise AuthenticationError(said)

    with pytest.raises(raised, match=message):
        while_it_lives(call)
