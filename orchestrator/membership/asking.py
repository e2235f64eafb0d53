"""`penstock scale RUN rollout=+2`: carries a wish to the run's controller, from another process, and tells what came
of it.

The run is found by its `cluster.json`; the agent on the driver's node has the mailbox that the controller empties
(`ear.py`). The wish is granted whether or not the asking process waits for the answer.
"""

from collections.abc import Sequence
from typing import Any

import yaml

from penstock.conf.errors import CannotScale, ResourceError
from penstock.orchestrator.cluster.connection import at_run
from penstock.orchestrator.membership.wishes import Wish
from penstock.orchestrator.run_directory.fetching import at_place
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_lock import ENDS, last_turn

PATIENCE_S = 60.0
"""Seconds to wait for the answer beyond what starting and draining may take."""


def ask(run: str, texts: Sequence[str], drain_s: float | None = None) -> tuple[list[str], list[str]]:
    """Ask a run for a change. Returns what was done, one line a role, and what was not. `run`: its directory or URL.
    Raises `CannotScale` for what cannot be, `ConfigError` if `run` is no run, `ResourceError` if it does not answer,
    `CheckpointError` for a URL that does not."""
    for text in texts:
        Wish.of(text)
    with at_place(run) as directory:
        answer = _answer(directory, texts, drain_s)
    if answer is None:
        raise CannotScale(f"{directory.path.name}: the run ended before it could be done.")
    if answer["refused"]:
        raise CannotScale(answer["refused"])
    return answer["done"], answer["problems"]


def _answer(directory: RunDirectory, texts: Sequence[str], drain_s: float | None) -> Any:
    """The controller's answer; None if the run ends meanwhile."""
    last = last_turn(directory.read_events())
    if last.get("kind") in ENDS:
        raise CannotScale(f"{directory.path.name}: the run is over ({last['kind']} at {last['time']}).")
    if not directory.cluster_file.is_file():
        raise CannotScale(f"{directory.path.name}: it has not started its actors yet. Ask again in a moment.")
    rollout = yaml.safe_load(directory.config_file.read_text())["rollout"]
    longest_s = PATIENCE_S + 2 * rollout["start_timeout_s"] + (rollout["drain_s"] if drain_s is None else drain_s)
    with at_run(directory, "the controller") as found:
        import ray  # late: it reads its environment when it is imported

        agent = ray.get_actor(f"Agent-{found['host']}", namespace=found["namespace"])
        try:
            return ray.get(agent.ask.remote((list(texts), drain_s)), timeout=longest_s)
        except ray.exceptions.GetTimeoutError:
            raise ResourceError(
                f"{directory.path.name}: no answer within {longest_s:g} s. The run goes on with it: see `joined` and "
                f"`left` in {directory.place}/events.jsonl."
            ) from None
