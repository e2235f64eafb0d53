"""`penstock status`: what it shows of a store, and what it says of a run that is over or out of reach."""

import asyncio
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.reporting.status import print_status, print_store
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from tests.store.driver import make_spec
from tests.store.players import group


def made(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(load_config([f"output_dir={tmp_path}", "name=run"]))


def shown(run: RunDirectory) -> str:
    text = io.StringIO()
    print_status(str(run.path), Console(file=text, width=140))
    return text.getvalue()


def test_a_store_is_shown_by_stage_lease_and_waiter() -> None:
    async def main() -> str:
        store = Store(make_spec())
        client = StoreClient(store)
        waiting = asyncio.ensure_future(StoreClient(store).lease("reference", 1, "Scorer-reference-0"))
        await client.put_groups([group(number) for number in range(4)])
        for _ in range(2):
            lease = await client.lease("rollout", 1, "Rollout-0")
            assert lease is not None
        lease = await client.lease("rollout", 1, "Rollout-1")
        assert lease is not None
        await client.drop(lease, lease.rows.row_ids, "empty_response", "0 tokens of [16]")
        text = io.StringIO()
        print_store(await client.describe(), Console(file=text, width=140))
        waiting.cancel()
        await store.close("test over")
        return text.getvalue()

    text = asyncio.run(main())
    rollout = next(line for line in text.splitlines() if line.startswith("rollout"))
    assert rollout.split()[1:5] == ["0", "2", "4", "0"]  # waiting, free, leased, done
    assert "Scorer-reference-0" in next(line for line in text.splitlines() if line.startswith("reference"))
    assert text.count("Rollout-0") == 2
    assert "dropped rows: empty_response 2" in text
    assert "rollout, 2 rows from 4: empty_response: 0 tokens of [16]" in text
    assert re.search(r"oldest group [012]: lacks .*response_ids \(2\)", text)


def test_a_run_that_has_ended_is_described_by_what_it_logged_last(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.log_metrics({"step": 7, "store/rows_trained": 512, "dropped/reward_error": 3, "reward/mean": 0.5})
    run.event("failed", error="WorkerDied", message="Rollout-0 is gone [/src/pair.cc:537]")
    text = shown(run)
    assert "failed at" in text
    assert "step 7" in text
    assert "WorkerDied Rollout-0 is gone [/src/pair.cc:537]" in text
    assert "dropped/reward_error" in text
    assert "reward/mean" not in text


def test_a_run_is_shown_by_its_name_and_its_id_and_none_is_made_to_show_it(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.event("end")
    assert shown(run).startswith("run  end at")
    title = f"run ({run.run_id})"
    assert shown(run).startswith(f"{title}  end at")


def test_a_run_that_has_not_started_its_actors_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no cluster\.json"):
        shown(made(tmp_path))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        print_status(str(tmp_path / "nothing"), Console(file=io.StringIO()))
