"""`penstock status RUN`: looks into the store of a run that is going on, from another process.

The run leaves `cluster.json` in its directory, with the address of its Ray and the namespace of its actors. A run that
has ended is described by what it logged last.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.conf.errors import ConfigError
from penstock.orchestrator.cluster.ray_connection import at_run
from penstock.orchestrator.run_directory.fetching import open_at
from penstock.orchestrator.run_directory.run_directory import RUN_ID, RunDirectory
from penstock.orchestrator.run_directory.run_lock import ENDS, last_start_or_end
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store_actor import STORE

ANSWER_S = 20.0
"""Deadline of the store's answer."""
MAX_LEASES = 12
"""Most leases shown, those that expire first before others."""
MAX_DROPS = 5
"""Most drops shown with what their workers said, the newest."""
STATES = ("waiting", "free", "leased", "done")


def print_status(run: str, console: Console) -> None:
    """Print the status of a run. `run`: its directory or URL. Raises `ConfigError` if `run` is no run, `ResourceError`
    if it goes on and does not answer, `CheckpointError` for a URL that does not."""
    with open_at(run) as directory:
        _print(directory, console)


def _print(directory: RunDirectory, console: Console) -> None:
    last = last_start_or_end(directory.read_events())
    if last.get("kind") in ENDS:
        _print_end(directory, last, console)
        return
    if not directory.cluster_file.is_file():
        raise ConfigError(
            f"{directory.place}: has no cluster.json; it has not started its actors yet. Ask again in a moment."
        )
    described = _ask(directory)
    console.print(f"{_title(directory)}  {_last_step(directory)}")
    print_store(described, console)


def print_store(described: dict[str, Any], console: Console) -> None:
    """Print `StoreClient.describe()` as tables."""
    console.print(_stages(described))
    credits = described["credits"]
    line = f"groups active {credits['active']} of {credits['max']}  ·  version served {credits['served']}"
    line += f"  ·  {described['blocks']['count']} blocks, {described['blocks']['bytes'] / 2**20:,.1f} MiB"
    console.print(line)
    if described["oldest_group"] is not None:
        lacking = ", ".join(f"{name} ({count})" for name, count in described["oldest_group_waits_for"].items())
        console.print(f"oldest group {described['oldest_group']}: " + (f"lacks {lacking}" if lacking else "complete"))
    if described["leases"]:
        console.print(_leases(described["leases"]))
    dropped = {name: count for name, count in described["counters"].items() if name.startswith("dropped/") and count}
    if dropped:
        console.print("dropped rows: " + ", ".join(f"{name[8:]} {count}" for name, count in sorted(dropped.items())))
        for said in described["last_drops"][-MAX_DROPS:]:
            console.print(f"  {escape(said)}")


def _stages(described: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("rows of stage")
    for state in STATES:
        table.add_column(state, justify="right")
    table.add_column("mean wait", justify="right")
    table.add_column("who waits")
    for stage, counts in described["rows"].items():
        waiters = described["waiters"].get(stage) or []
        others = described["waiting"].get(stage, 0) - len(waiters)
        names = ", ".join(dict.fromkeys(waiters)) + (f" {others} rank(s)" if others > 0 else "")
        states = [f"{counts[state]:,}" for state in STATES]
        table.add_row(stage, *states, f"{described['wait_s'][stage]:.3f} s", names.strip() or "–")
    return table


def _leases(leases: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("lease", "stage", "held by"):
        table.add_column(name)
    table.add_column("rows", justify="right")
    table.add_column("runs out in", justify="right")
    shown = sorted(leases, key=lambda lease: (lease["expires_in_s"] is None, lease["expires_in_s"] or 0.0))
    for lease in shown[:MAX_LEASES]:
        left = lease["expires_in_s"]
        expires = "never" if left is None else f"{left:.0f} s"
        table.add_row(str(lease["id"]), lease["stage"], lease["owner"], str(lease["open_rows"]), expires)
    if len(shown) > MAX_LEASES:
        table.add_row("…", f"and {len(shown) - MAX_LEASES} more", "", "", "")
    return table


def _ask(directory: RunDirectory) -> dict[str, Any]:
    with at_run(directory, "the store") as found:
        import ray

        client = StoreClient(ray.get_actor(STORE, namespace=found["namespace"]))
        return asyncio.run(asyncio.wait_for(client.describe(), ANSWER_S))


def _title(directory: RunDirectory) -> str:
    """The name and the id of a run. None is made to be shown."""
    has_id = (directory.path / RUN_ID).is_file()
    return f"[bold]{escape(directory.full_name)}[/]{f' ({directory.run_id})' if has_id else ''}"


def _last_step(directory: RunDirectory) -> str:
    steps = directory.read_metrics()
    return f"step {steps[-1]['step']}" if steps else "no step yet"


def _print_end(directory: RunDirectory, ended: Mapping[str, Any], console: Console) -> None:
    why = "" if ended["kind"] == "end" else escape(f": {ended.get('error', '')} {ended.get('message', '')}")
    console.print(f"{_title(directory)}  {ended['kind']} at {ended['time']}, {_last_step(directory)}{why}")
    steps = directory.read_metrics()
    counts = {
        name: value for name, value in (steps[-1] if steps else {}).items() if name.startswith(("store/", "dropped/"))
    }
    for name, value in sorted(counts.items()):
        if value:
            console.print(f"  {name:40} {value:,.6g}")
