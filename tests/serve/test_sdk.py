"""The Tinker SDK itself, in processes of its own, against the server on a backend in numpy."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from penstock.conf.serve import ServeConfig, TenantConfig
from penstock.serve.command import Server
from tests.serve.fake_backend import FakeBackend

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).parent / "sdk_loop.py"
WAIT_S = 900
ID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
"""The id of a session, another one in each."""
ENVIRONMENTS = {"0.22.0": ".venv-tinker22", "0.30.0": ".venv-tinker30"}
"""Environments of other versions, which `make verify` brings."""


def python_of(version):
    """The interpreter of an environment that has this version; that of the tests for the one that is installed."""
    if version == "installed":
        return sys.executable
    python = Path(__file__).parents[2] / ENVIRONMENTS[version] / "bin/python"
    if not python.exists():
        pytest.fail(
            f"there is no environment with tinker {version}: type `make {ENVIRONMENTS[version]}/.locked`", False
        )
    return str(python)


async def loop(python, url, key="tml-any", script=SCRIPT):
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "TINKER_BASE_URL": url,
                   "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        python, str(script), env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(re.sub(ID, "ID", out.decode()))


async def served(directory, backend, config, act):
    server = Server(config, backend, directory, "tml-any")
    url = await server.start()
    try:
        return await act(server, url)
    finally:
        await server.drain()


def check(seen):
    losses = [loss for loss, _ in seen["steps"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert seen["shape"] == [8]
    assert seen["unknown_loss"].startswith("RequestFailedError")
    assert "'stable_reinforce': its formula is not public" in seen["unknown_loss"]
    assert "beyond the vocabulary" in seen["wrong_token"]
    assert seen["after"] == seen["forward"] == seen["restored"]
    assert seen["samples"] == seen["named"]
    assert seen["prompt"] == seen["prompt_again"]
    assert seen["prompt"][0] is None
    assert seen["top"] == 2
    assert "num_samples: Expected `int` <= 1024" in seen["too_many"]
    assert "is there already" in seen["again"]
    assert seen["rank"] == 4
    assert seen["checkpoints"] == ["sampler_weights/named", "weights/kept"]
    assert seen["left"] == ["weights/kept"]
    assert "not published" in seen["published"]
    assert seen["runs"] == 2
    archive = ["adapter_config.json", "adapter_model.safetensors", "checkpoint.json"]
    assert seen.get("archive", archive) == archive


@pytest.mark.parametrize("version", ["installed", "0.30.0", "0.22.0"])
def test_the_sdk_trains_samples_saves_and_hears_what_is_refused(tmp_path, version):
    python = python_of(version)
    seen = asyncio.run(served(tmp_path, FakeBackend(), ServeConfig(port=0), lambda _, url: loop(python, url)))
    check(seen)


def test_two_sdk_clients_at_once_see_what_each_sees_alone(tmp_path):
    tenants = {"alice": TenantConfig(key="tml-alice"), "bob": TenantConfig(key="tml-bob", share=0.5)}
    backend = FakeBackend(lose_at={5, 17, 40})

    async def both(server, url):
        pair = await asyncio.gather(*(loop(sys.executable, url, f"tml-{name}") for name in tenants))
        return pair, server.status()

    config = ServeConfig(port=0, max_resident=1, snapshot_every=3, tenants=tenants)
    (first, second), status = asyncio.run(served(tmp_path, backend, config, both))
    check(first)
    assert first == second
    assert status["losses_of_ranks"] == 3
    assert {name: len(one["clients"]) for name, one in status["tenants"].items()} == {"alice": 2, "bob": 2}


def test_the_sdk_sends_again_what_a_tenant_has_no_room_for(tmp_path):
    tenants = {"alice": TenantConfig(key="tml-alice", max_waiting=1)}
    config = ServeConfig(port=0, tenants=tenants)
    check(asyncio.run(served(tmp_path, FakeBackend(), config, lambda _, url: loop(sys.executable, url, "tml-alice"))))


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_under_load_and_starts_again_changes_nothing(tmp_path, ending):
    alone = asyncio.run(
        served(tmp_path / "alone", FakeBackend(), ServeConfig(port=0), lambda _, url: loop(sys.executable, url))
    )
    port = str(free_port())

    async def start():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.serve.serve_numpy", str(tmp_path / "killed"), port,
            cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(WAIT_S):
            assert await process.stdout.readline()
        return process

    async def disturbed():
        process = await start()
        running = asyncio.ensure_future(loop(sys.executable, f"http://127.0.0.1:{port}"))
        for num_answers in (3, 9):
            while not running.done() and answered(tmp_path / "killed") < num_answers:
                await asyncio.sleep(0.01)
            process.send_signal(ending)
            assert await process.wait() == (0 if ending == signal.SIGTERM else -ending)
            process = await start()
        try:
            return await running
        finally:
            process.kill()
            await process.wait()

    assert asyncio.run(disturbed()) == alone


def answered(directory):
    """Number of requests that have a result on the disk."""
    return sum(file.read_bytes().count(b'"answer":') for file in directory.glob("clients/*/results.journal"))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
