"""A store on one machine, its client on another, and the cable between them pulled."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.network.connection import SILENCE_S
from tests.machines.cluster import Cluster, machines
from tests.machines.machine import Machine
from tests.machines.switch import address_of

pytestmark = [pytest.mark.real, pytest.mark.machines]

NOTICED_S = SILENCE_S + 300
"""The kernel tells within `SILENCE_S` and a probe or two."""
STORE = """
import asyncio, json, os, sys
from penstock.network.connection import new_token
from penstock.store.client.store_client import StoreClient
from penstock.store.data.segments import Segments
from penstock.store.service.store_server import StorePort
from penstock.store.service.store import Store
from tests.store.driver import make_spec
from tests.store.players import group

async def main():
    spec = make_spec(lease_timeout_s=float(sys.argv[2]))
    segments = Segments(f"/dev/shm/{os.getpid()}", f"/tmp/{os.getpid()}", spec.shared_bytes)
    store = Store(spec, segments=segments, port=StorePort(sys.argv[1], new_token()))
    endpoint = await store.endpoint()
    address = endpoint.address
    print(json.dumps([address.host, address.port, endpoint.token.hex()]), flush=True)
    client = StoreClient(store)
    await client.put_groups([group()])
    while (await client.stats()).get("leases/rollout", 0) < 1:
        await asyncio.sleep(0.01)
    lease = await client.lease("rollout", 1, "survivor")  # what the other one had
    print(json.dumps(lease.rows.row_ids.tolist()), flush=True)

asyncio.run(main())
"""
CLIENT = """
import asyncio, json, sys
from penstock.network.connection import Address
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store_server import Endpoint
from tests.store.players import values_of

async def main():
    host, port, token = json.loads(sys.argv[1])
    client = StoreClient(Endpoint("", "/not/here", ("", ""), Address(host, port), bytes.fromhex(token)))
    lease = await client.lease("rollout", 1, "remote")
    waiting = asyncio.ensure_future(client.lease("group_advantage", 1, "remote"))
    print("holds", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    try:  # into the cable that was pulled
        await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
        for stage in ("reward", "reference"):
            more = await client.lease(stage, 2, "remote")
            await client.write(more, more.rows.row_ids, values_of(stage, more))
        print(json.dumps((await waiting).rows.row_ids.tolist()))
    except Exception as error:
        (other,) = await asyncio.gather(waiting, return_exceptions=True)
        print(json.dumps([type(error).__name__, str(error), type(other).__name__]))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with machines(2) as cluster:
        yield cluster


@contextmanager
def started(machine: Machine, program: str, *arguments: Any) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with machine.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_cut_of_five_seconds_is_noticed_by_nobody(cluster: Cluster) -> None:
    """Leases run out after 15: hearts beat into the cut, too."""
    with started(cluster[1], STORE, address_of(1), 15) as store, started(cluster[2], CLIENT, line(store)) as client:
        assert line(client) == "holds"
        cluster[2].cut()
        go_on(client)
        time.sleep(5)
        cluster[2].mend()
        assert json.loads(line(client)) == [0, 1]


@pytest.mark.real
def test_a_client_that_is_cut_off_is_told_and_what_it_held_goes_back(cluster: Cluster) -> None:
    """Leases do not run out: the end of the connection is what gives them back."""
    with started(cluster[1], STORE, address_of(1), 6000) as store, started(cluster[2], CLIENT, line(store)) as client:
        assert line(client) == "holds"
        cluster[2].cut()
        begun = time.monotonic()
        go_on(client)
        assert json.loads(line(store)) == [0, 1]
        kind, message, waited = json.loads(line(client))
        assert time.monotonic() - begun < NOTICED_S
        assert kind == "StoreUnreachable"
        assert f"nothing was heard of the store at {address_of(1)}" in message
        assert waited == "StoreUnreachable"
        cluster[2].mend()
