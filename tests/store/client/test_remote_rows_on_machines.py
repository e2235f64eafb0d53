"""Rows between machines that have links, memory and disks of their own: no payload passes the store's."""

from pathlib import Path

import pytest

from benchmarks.machines.rows import BATCH, TOKENS, Processes
from tests.machines.cluster import machines

pytestmark = [pytest.mark.real, pytest.mark.machines]


def test_rows_go_from_their_machine_to_their_readers_and_none_past_the_stores(tmp_path: Path) -> None:
    with machines(3) as cluster, Processes(cluster, tmp_path) as processes:
        remote, local = processes.send("far", 8 * BATCH), processes.send("near", 8 * BATCH)
    assert remote["bytes"] == local["bytes"] == 8 * BATCH * TOKENS * 4
    stores, producers, readers = remote["link_bytes"]
    assert stores < 0.05 * remote["bytes"]
    assert 1.0 < producers / remote["bytes"] < 1.1
    assert 1.0 < readers / remote["bytes"] < 1.1
    assert max(local["link_bytes"]) < 0.05 * local["bytes"]
