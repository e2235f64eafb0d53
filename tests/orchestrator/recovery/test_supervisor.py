"""Members that die are replaced while the others go on, and the accounts are exact. On a virtual clock: the real
controller, supervisor and store over scripted actors."""

import asyncio
import itertools
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from penstock.conf.errors import StoreDied, StoreError, WorkerDied
from penstock.metering.meters import Meters
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.recovery.decisions import RunFaults
from penstock.orchestrator.recovery.restart import Restarts, StepJournal, StoreRestart, Supervisor, nothing_to_catch_up
from penstock.orchestrator.run_context import RunContext
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.client.store_client import StoreClient
from penstock.store.errors import StoreUnreachable
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from tests.amounts import amount
from tests.fakes.actors import FakeHandle, never
from tests.metering.measured import measured
from tests.orchestrator.scripted_fleet import ScriptedFleet, controller_over, flow_of, scripted_config, store_of
from tests.run_files import metrics_of
from tests.store.invariants import check_invariants
from tests.store.players import group, leased, values_of
from tests.store.visitors import serve, visit_by
from tests.virtual_time import run_virtually

NUM_STEPS = 30
GROUPS, SIZE = 4, 2
MANY = ("faults.max_restarts=1000", "faults.pause_s=0.1")


def config_of(tmp_path: Path, *words: str) -> Any:
    return scripted_config(
        tmp_path,
        "rollout.num_workers=3",
        f"trainer.max_steps={NUM_STEPS}",
        f"trainer.groups_per_step={GROUPS}",
        f"algorithm.group_size={SIZE}",
        "checkpoint.every_steps=0",
        *words,
    )


async def kill(fleet: ScriptedFleet, random: Random, roles: tuple[str, ...], killed: list[str]) -> None:
    """Now and then one of them, wherever it is: serving, loading, or just made. Ranks once a step: twice would be a
    return to the checkpoint."""
    lost: set[int] = set()
    while True:
        await asyncio.sleep(random.expovariate(1 / 8.0))
        names = [name for role in roles for name, _ in fleet.role(role)]
        name = random.choice([*names, "nobody", *(["Store"] if "store" in roles else [])])
        if name == "Store":
            fleet.store.die()
            killed.append(name)
            continue
        step = fleet.store.ledger.rounds.formed
        if name.startswith("Trainer") and {step - 1, step, step + 1} & lost:
            continue
        if fleet.strike(name):
            killed.append(name)
            lost |= {step} if name.startswith("Trainer") else set()


async def look(fleet: ScriptedFleet, found: set[str]) -> None:
    """Which roles have devices at the same time, from the first step on."""
    while True:
        await asyncio.sleep(0.5)
        roles = [
            role for role in ("rollout", "trainer")
            if any(handle.actor.has_device for _, handle in fleet.role(role) if not handle.is_dead)
        ]  # fmt: skip
        if fleet.store.ledger.rounds.formed:
            found.add(" and ".join(roles))


@pytest.mark.parametrize(("max_staleness", "placement"), [(0, "disaggregated"), (0, "colocated"), (2, "disaggregated")])
@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(8)))
def test_whoever_dies_and_whenever_each_row_is_trained_once_within_its_bound(
    max_staleness: int, placement: str, seed: int, tmp_path: Path
) -> None:
    config = config_of(
        tmp_path, f"max_staleness={max_staleness}", "trainer.num_ranks=2", f"placement={placement}", *MANY
    )
    random, killed, found = Random(seed), list[str](), set[str]()

    async def main() -> dict[str, float]:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, random)
        directory = RunDirectory.create(config)
        looking = asyncio.ensure_future(look(fleet, found))
        killing = asyncio.ensure_future(
            kill(fleet, random, ("rollout", "reward", "compute", "prompts", "trainer", "store"), killed)
        )
        await asyncio.wait_for(controller_over(fleet, config, directory).run(), 1e6)
        killing.cancel()
        looking.cancel()
        directory.close()
        check_invariants(fleet.store.ledger)
        return await fleet.store.stats()

    numbers = run_virtually(main())
    assert len(killed) >= 5
    assert ("rollout and trainer" in found) == (placement == "disaggregated")
    assert numbers["store/rows_trained"] == NUM_STEPS * GROUPS * SIZE
    assert not any(value for name, value in numbers.items() if name.startswith("dropped/"))
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert max(line.get("staleness/max", 0) for line in lines) <= max_staleness
    events = RunDirectory.open(tmp_path / "run").read_events()
    assert {event["kind"] for event in events} >= {"fault", "recovered"}
    last = lines[-1]
    assert sum(value for name, value in last.items() if name in ("faults/rollout", "faults/reward", "faults/compute"))


def test_a_member_that_dies_again_and_again_ends_what_goes_on_with_its_own_name(tmp_path: Path) -> None:
    config = config_of(tmp_path, "max_staleness=1", "faults.max_restarts=2", "faults.max_returns=0")

    async def main() -> None:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, Random(1))

        async def kill_it() -> None:
            while True:
                await asyncio.sleep(5)
                fleet.strike("Reward-0")

        killing = asyncio.ensure_future(kill_it())
        directory = RunDirectory.create(config)
        meters = Meters()
        with pytest.raises(WorkerDied, match="Reward-0 has died"):
            await asyncio.wait_for(controller_over(fleet, config, directory, meters=meters).run(), 1e6)
        killing.cancel()
        assert measured(meters) == {"run_members_lost_total reward": 3, "run_members_replaced_total reward": 2}
        assert [event["kind"] for event in directory.read_events()].count("fault") == 3
        directory.close()

    run_virtually(main())


def test_a_step_that_ends_while_the_store_comes_back_is_told_to_the_new_one(tmp_path: Path) -> None:
    """The new store knows the steps before, and its ranks are not yet attached to it, when the step ends."""
    config = config_of(tmp_path, "max_staleness=1", "faults.max_returns=0")
    ended = asyncio.Event()

    class Fleet(ScriptedFleet):
        async def attach_trainers(self) -> None:
            await ended.wait()
            await asyncio.sleep(1)
            await super().attach_trainers()

    async def main() -> None:
        flow = flow_of(config)
        fleet = Fleet(store_of(config, flow), config, flow, Random(1))
        directory = RunDirectory.create(config)
        (_, rank), *_ = fleet.role("trainer")
        update = rank.actor.step

        async def step(number: int, *more: Any) -> Any:
            if number != 3:
                return await update(number, *more)
            report = await update(number, *more)
            fleet.store.die()
            await asyncio.sleep(30)  # the store is back, but for the ranks
            asyncio.get_running_loop().call_later(0.5, ended.set)
            return report

        rank.actor.step = step
        await asyncio.wait_for(controller_over(fleet, config, directory).run(), 1e6)
        assert (await fleet.store.stats())["store/rows_trained"] == NUM_STEPS * GROUPS * SIZE
        events = [(event["kind"], event["role"]) for event in directory.read_events() if "role" in event]
        assert events == [("fault", "store"), ("recovered", "store")]
        directory.close()

    run_virtually(main())


def recovery_of(config: Any, fleet: ScriptedFleet) -> tuple[RunContext, StoreRestart, Supervisor]:
    """Of a new run, whose directory the caller closes."""
    progress = ProgressDisplay(config, "run", console=Console(quiet=True))
    context = RunContext.of(config, fleet, RunDirectory.create(config), progress)  # type: ignore[arg-type]
    restarts = Restarts(context.directory, progress.note, RunFaults(config.faults))
    stores = StoreRestart(context, restarts, StepJournal(Owner(), 0))
    return context, stores, Supervisor(context, restarts, stores)


def test_the_store_is_brought_back_though_who_noticed_its_loss_leaves(tmp_path: Path) -> None:
    config = config_of(tmp_path, "max_staleness=1", "faults.max_returns=0")

    async def main() -> None:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, Random(1))
        lost = asyncio.Event()
        attach = fleet.attach_trainers

        async def attach_late() -> None:
            lost.set()
            await asyncio.sleep(5)
            await attach()

        fleet.attach_trainers = attach_late  # type: ignore[method-assign]
        context, stores, supervisor = recovery_of(config, fleet)
        fleet.strike("Reward-0")
        fleet.store.die()
        leaving = asyncio.ensure_future(supervisor.keep("reward", ["Reward-0"], nothing_to_catch_up))
        await lost.wait()
        supervisor.expect_end("Reward-0")
        leaving.cancel()
        await asyncio.wait([leaving])
        assert await stores.wait_for_restart(StoreUnreachable("gone"), 0)
        assert stores.incarnation == 1
        await context.store.stats()
        context.directory.close()

    run_virtually(main())


def test_snapshots_that_fail_are_tried_after_growing_pauses(tmp_path: Path) -> None:
    """And each is told its deadline, so that it has ended before the next."""
    config, times = config_of(tmp_path, "max_staleness=1", "faults.store_snapshot_s=10"), list[float]()

    async def refused(root: str, number: int, is_apart: bool, timeout_s: float) -> str:
        assert (number, timeout_s) == (1, config.rollout.start_timeout_s)
        times.append(asyncio.get_running_loop().time())
        raise StoreError("the disk is full")

    async def main() -> None:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, Random(1))
        context, stores, _ = recovery_of(config, fleet)
        context.store.snapshot = refused  # type: ignore[method-assign]
        snapshots = asyncio.ensure_future(stores.take_snapshots())
        await asyncio.sleep(2000)
        snapshots.cancel()
        assert [event["kind"] for event in context.directory.read_events()] == ["snapshot_failed"]
        context.directory.close()

    run_virtually(main())
    pauses = [round(after - before) for before, after in itertools.pairwise(times)]
    assert pauses == [20, 40, 80, 160, 320, 320, 320, 320, 320]


@pytest.mark.parametrize("every_s", [0, 5])
@pytest.mark.parametrize("is_seen", [False, True])
def test_a_store_that_was_taken_over_comes_back_once_a_snapshot_of_it_is_taken(
    tmp_path: Path, every_s: float, is_seen: bool
) -> None:
    """Before that its loss is a return: the snapshot that the run began with knows nothing of later steps, and may have
    been removed since."""
    config = config_of(tmp_path, "max_staleness=1", f"faults.store_snapshot_s={every_s}")

    async def main() -> None:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, Random(1))
        other = SimpleNamespace(step=2, store=f"{tmp_path}/gone")  # than the step that this process goes on after
        fleet.resumed = other  # type: ignore[assignment]
        context, stores, _ = recovery_of(config, fleet)
        if is_seen:
            snapshots = asyncio.ensure_future(stores.take_snapshots())
            await asyncio.sleep(3)
            snapshots.cancel()
        fleet.store.die()
        lost = StoreUnreachable("it is gone")
        if is_seen:
            assert await stores.wait_for_restart(lost, 0)
        else:
            with pytest.raises(StoreUnreachable, match="it is gone"):
                await stores.wait_for_restart(lost, 0)
        context.directory.close()

    run_virtually(main())


def test_a_store_that_ray_calls_dead_is_replaced_though_it_still_answers(tmp_path: Path) -> None:
    """And the member that has heard of it is not."""
    config = config_of(tmp_path, "max_staleness=1")

    async def main() -> None:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, Random(1))
        served = iter([StoreDied("killed")])
        reward = fleet.actors["Reward-0"] = FakeHandle(run=lambda store: next(served, None) or never())
        context, stores, supervisor = recovery_of(config, fleet)
        keeping = asyncio.ensure_future(supervisor.keep("reward", ["Reward-0"], nothing_to_catch_up))
        async with asyncio.timeout(60):
            while stores.incarnation == 0:
                await asyncio.sleep(0.1)
        keeping.cancel()
        assert fleet.actors["Reward-0"] is reward
        events = [(event["kind"], event["role"]) for event in context.directory.read_events()]
        assert events == [("fault", "store"), ("recovered", "store")]
        context.directory.close()

    run_virtually(main())


@pytest.mark.parametrize(
    ("num_lost", "is_well", "expected"),
    [(1, True, ["reconnected"]), (3, True, ["reconnected"] * 3), (4, True, ["reconnected"] * 3 + ["fault"]),
     (1, False, ["fault"])],
)  # fmt: skip
def test_a_member_that_is_well_serves_again_over_a_new_connection_to_the_store(
    tmp_path: Path, num_lost: int, is_well: bool, expected: list[str]
) -> None:
    config = config_of(tmp_path, "max_staleness=1", "faults.max_restarts=3")

    async def main() -> None:
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, Random(1))
        served = iter([StoreUnreachable("nothing was heard of the store")] * num_lost)
        engine = fleet.actors["Rollout-0"] = FakeHandle(
            run=lambda store: next(served, None) or never(), progress=None if is_well else WorkerDied("it is dead")
        )
        context, stores, supervisor = recovery_of(config, fleet)
        keeping = asyncio.ensure_future(supervisor.keep("rollout", ["Rollout-0"], nothing_to_catch_up))
        await asyncio.sleep(100)
        keeping.cancel()
        kinds = [event["kind"] for event in context.directory.read_events() if event["kind"] != "recovered"]
        assert kinds == expected
        assert (fleet.actors.get("Rollout-0") is engine) == ("fault" not in expected)
        assert stores.incarnation == 0
        context.directory.close()

    run_virtually(main())


def test_rows_of_a_lost_connection_come_to_the_same_engine_again(tmp_path: Path) -> None:
    config, leases = config_of(tmp_path, "max_staleness=1"), list[list[int]]()

    async def body(store: Store, endpoint: Endpoint) -> None:
        done = asyncio.Event()

        async def sample(_: Any) -> None:
            client, link = await visit_by("tcp", store, endpoint)
            lease = await leased(client, "rollout", 1, "Rollout-0")
            leases.append(lease.rows.row_ids.tolist())
            if len(leases) == 1:
                link.wire.close()  # type: ignore[attr-defined]
            await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
            done.set()
            await never()

        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, Random(1))
        fleet.actors["Rollout-0"] = FakeHandle(run=sample)
        context, _, supervisor = recovery_of(config, fleet)
        await StoreClient(store).put_groups([group()])
        keeping = asyncio.ensure_future(supervisor.keep("rollout", ["Rollout-0"], nothing_to_catch_up))
        await asyncio.wait_for(done.wait(), 60)
        keeping.cancel()
        assert [event["kind"] for event in context.directory.read_events()] == ["reconnected"]
        context.directory.close()

    serve(tmp_path, body)
    assert leases == [[0, 1]] * 2


def test_who_fails_when_the_run_is_over_is_not_replaced(tmp_path: Path) -> None:
    config = config_of(tmp_path, "max_staleness=1")

    async def main() -> None:
        flow = flow_of(config)
        store = store_of(config, flow)
        fleet = ScriptedFleet(store, config, flow, Random(1))
        fleet.actors["Reward-0"] = FakeHandle(run=StoreUnreachable("no connection to the store: it has closed"))
        context, _, supervisor = recovery_of(config, fleet)
        supervisor.close()
        await asyncio.wait_for(supervisor.keep("reward", ["Reward-0"], nothing_to_catch_up), 60)
        assert context.directory.read_events() == []
        context.directory.close()

    run_virtually(main())
