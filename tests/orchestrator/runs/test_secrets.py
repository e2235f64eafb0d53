"""Secrets in every setting that can hold one reach their users and stay out of all that a run and a server leave, say
and show."""

import contextlib
import hashlib
import json
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from starlette.testclient import TestClient

from penstock.conf.model import FreshModelConfig
from penstock.ui.answers import QUESTIONS
from penstock.ui.app import make_app
from penstock.workers.fresh_model import build_fresh_model
from tests.run_files import events_of, metrics_of
from tests.serve.served import served

pytestmark = pytest.mark.real

MARK = "s3cr3t"
"""In each secret of the test."""
AGENT = """
import hashlib, json, os, sys, urllib.request
for name, digest in json.loads(sys.argv[1]).items():
    assert hashlib.sha256(os.environ[name].encode()).hexdigest() == digest, name
json.load(sys.stdin)
asked = {"model": "policy", "messages": [{"role": "user", "content": "1 + 1?"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(asked).encode(), headers
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


class Judge(BaseHTTPRequestHandler):
    """Answers who has its key."""

    keys: list[str]

    def do_POST(self) -> None:
        self.keys.append(self.headers["Authorization"])
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": json.dumps({"score": 5})}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        said = {"id": "1", "object": "chat.completion", "created": 0, "model": "j", "choices": [choice]}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def judge() -> Iterator[tuple[str, list[str]]]:
    """The address of a judge, and the keys that it is sent."""
    keys: list[str] = []
    handler = type("Handler", (Judge,), {"keys": keys})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", keys
        server.shutdown()


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """Command lines with a secret that `ps` shows meanwhile."""
    found: set[str] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if MARK in (text := file.read_bytes().decode(errors="replace")):
                        found.add(text)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def with_secrets(*places: Path) -> list[str]:
    """Files that have one in them."""
    files = [file for place in places for file in place.rglob("*") if file.is_file()]
    assert len(files) > 10
    return [str(file) for file in files if MARK.encode() in file.read_bytes()]


def page_of(runs: Path, run: str) -> str:
    """All that the page says of a run."""
    asked = {"run": run, "step": "1", "place": "0", "key": "reward/mean", "member": "Trainer-0"}
    with TestClient(make_app(runs), base_url="http://localhost:8420") as page:
        answers = [page.get(f"/api/{name}", params=asked) for name in QUESTIONS]
    assert sum(answer.status_code == 200 for answer in answers) >= 6
    return "".join(answer.text for answer in answers)


def write_recipe(directory: Path, recipe: Mapping[str, Any]) -> str:
    directory.mkdir()
    (directory / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)))
    return f"recipe={directory}"


def logs_of_ray() -> Path:
    node: Any = ray._private.worker._global_node
    return Path(node.get_session_dir_path()) / "logs"


def test_a_run_uses_its_secrets_and_shows_none_also_when_it_is_resumed(
    tmp_path: Path, cluster: str, warm_python: Sequence[str], driver_environment: dict[str, str]
) -> None:
    build_fresh_model(tmp_path / "model", FreshModelConfig(num_layers=1, hidden_size=64, intermediate_size=64), seed=0)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    (tmp_path / "agent.py").write_text(AGENT)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "judge").write_text(f"{MARK}-judge\n")
    variables = {"LITERAL": f"{MARK}-literal", "FROM_FILE": f"{MARK}-judge", "FROM_VARIABLE": f"{MARK}-variable"}
    digests = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in variables.items()}
    environment = {
        **driver_environment, "SEARCH_TOKEN": variables["FROM_VARIABLE"], "WANDB_API_KEY": f"{MARK}{'0' * 34}",
        "AWS_SECRET_ACCESS_KEY": f"{MARK}-aws", "OPENAI_API_KEY": f"{MARK}-openai", "HF_TOKEN": f"hf_{MARK}",
        "COLUMNS": "200",
    }  # fmt: skip
    with judge() as (url, keys), watched() as shown:
        word = write_recipe(hidden / "recipe", {
            "description": "with secrets",
            "model": {"path": str(tmp_path / "model")},
            "data": {"path": str(tmp_path / "questions.jsonl")},
            "environment": {"name": "agent", "options": {
                "command": [str(warm_python[0]), str(tmp_path / "agent.py"), json.dumps(digests)],
                "env": {"LITERAL": variables["LITERAL"], "FROM_FILE": f"file:{hidden}/judge",
                        "FROM_VARIABLE": "env:SEARCH_TOKEN"},
            }},
            "rewards": [
                {"function": "environment"},
                {"function": "judge", "name": "first",
                 "options": {"url": url, "model": "a", "key": f"file:{hidden}/judge"}},
                {"function": "judge", "name": "second",
                 "options": {"url": url, "model": "b", "key": f"{MARK}-literal-judge"}},
            ],
            "tracking": {"sinks": ["mlflow", "wandb"], "wandb": {"mode": "offline"},
                         "mlflow": {"tracking_uri": f"http://me:{MARK}-mlflow@127.0.0.1:1"}},
        })  # fmt: skip
        words = [
            word, "rollout.engine=hf", "rollout.sampling.max_tokens=8", "rollout.num_threads=1",
            "trainer.num_threads=1", "trainer.groups_per_step=2", "algorithm.group_size=2", "name=quiet",
            "checkpoint.every_steps=1", "resume=auto", f"output_dir={tmp_path}/runs",
        ]  # fmt: skip
        said = ""
        for num_steps in (1, 2):
            done = subprocess.run(
                [*warm_python, "-m", "penstock.cli.main", "run", *words, f"trainer.max_steps={num_steps}"],
                env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
            )  # fmt: skip
            said += done.stdout + done.stderr
            assert done.returncode == 0, said[-4000:]
            expected = {f"Bearer {MARK}-judge", f"Bearer {MARK}-literal-judge"}
            assert set(keys) == expected
            keys.clear()
    run = tmp_path / "runs" / "quiet"
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
    assert any("127.0.0.1" in event.get("error", "") for event in events_of(run)), "the tracker says where it was"
    assert with_secrets(tmp_path / "runs", logs_of_ray()) == []
    assert MARK not in said
    assert MARK not in page_of(tmp_path / "runs", "quiet")
    assert shown == set()


def test_a_server_knows_its_tenants_and_shows_no_key(
    tmp_path: Path, cluster: str, warm_python: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_fresh_model(tmp_path / "model", FreshModelConfig(num_layers=1, hidden_size=64, intermediate_size=64), seed=0)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "bob").write_text(f"tml-{MARK}-bob\n")
    (hidden / "operator").write_text(f"tml-{MARK}-operator\n")
    monkeypatch.setenv("ALICE_KEY", f"tml-{MARK}-alice")
    word = write_recipe(hidden / "recipe", {
        "description": "tenants",
        "model": {"path": str(tmp_path / "model")},
        "serve": {"tenants": {
            "alice": {"key": "env:ALICE_KEY"}, "bob": {"key": f"file:{hidden}/bob"},
            "carol": {"key": f"tml-{MARK}-carol"},
        }},
    })  # fmt: skip
    words = [word, "rollout.engine=hf", "rollout.num_threads=1", "trainer.num_threads=1", "name=quiet",
             "--key-file", str(hidden / "operator")]  # fmt: skip
    shown = []
    (place := tmp_path / "server").mkdir()
    with watched() as seen, served(place, words, warm_python, cluster) as server:
        for tenant in ("alice", "bob", "carol", "operator"):
            headers = {"x-api-key": f"tml-{MARK}-{tenant}", "x-idempotency-key": tenant}
            made = httpx.post(f"{server.url}/api/v1/create_session", json={"tags": []}, headers=headers)
            assert (made.status_code == 200) == (tenant != "operator")
            told = [httpx.get(f"{server.url}/{name}", headers=headers) for name in ("status", "metrics")]
            assert [answer.status_code for answer in told] == [200, 200]
            shown += [made.text, *(answer.text for answer in told)]
        refused = httpx.get(f"{server.url}/status", headers={"x-api-key": f"tml-{MARK}-nobody"})
        assert refused.status_code == 401
        shown += [refused.text, page_of(place, "quiet")]
    assert MARK not in "".join([*shown, *server.lines])
    assert seen == set()
    assert with_secrets(place, logs_of_ray()) == []
    assert (place / "quiet" / "serve").stat().st_mode & 0o777 == 0o700
