"""A store in a process of its own, which can be killed.

with store_process(tmp_path) as store:
    client = StoreClient(store.endpoint)
    store.kill()
"""

import asyncio
import json
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.network.connection import new_token
from penstock.store.data.segments import Segments
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint, StorePort
from tests.store.driver import make_spec


class StoreProcess:
    """Lifecycle: made by `store_process`, then perhaps killed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert process.stdout is not None
        self.endpoint: Endpoint = pickle.loads(bytes.fromhex(process.stdout.readline()))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def store_process(tmp_path: Path, restore: Path | None = None, **changes: Any) -> Iterator[StoreProcess]:
    """`changes`: of the spec, plain data."""
    place = tmp_path / uuid.uuid4().hex
    place.mkdir()
    command = [sys.executable, "-m", "tests.store.own_process", str(place), str(restore or ""), json.dumps(changes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield StoreProcess(process)
        finally:
            process.kill()


async def main(place: Path, restore: str, changes: dict[str, Any]) -> None:
    spec = make_spec(**changes)
    segments = Segments(str(place / "shm"), str(place / "disk"), spec.shared_bytes)
    store = Store(spec, segments=segments, restore=restore or None, port=StorePort("127.0.0.1", new_token()))
    print(pickle.dumps(await store.endpoint()).hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until it is killed, or whoever started it has ended


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
