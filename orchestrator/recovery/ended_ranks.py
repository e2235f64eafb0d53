"""Ranks that NCCL's watchdog has ended: their loss gets the name that it has where gloo reports it.

    a call of a rank fails: Ray says that it has died ─▶ its last lines, from its node's agent ─▶ watchdog_error
                                                     ─▶ what each rank called ─▶ stacks/ of the run's directory

So a hang is a `DeadlineExceeded` with NCCL too, and is treated as one; the rest of a message says which rank did not
come, and which file has the ranks' last calls.
"""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.fleet.actor_maker import records_of
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.fleet.member_table import GANGS
from penstock.orchestrator.cluster.ray_calls import Kind, kind_of, outcomes, run_in_thread
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.trainer.collective_errors import RECORD_PREFIX, watchdog_error

READ_S = 10.0
"""Deadline for an agent to read what its node's ranks printed last."""


async def named_failure(fleet: Fleet, directory: RunDirectory, team: Sequence[str], failure: Exception) -> Exception:
    """The failure under the name of what the watchdog says, with the ranks' last calls in the run's directory; the
    failure as it is, where the watchdog says nothing. `team`: all ranks of a model."""
    if kind_of(failure) is not Kind.DEATH or len(team) < 2:
        return failure
    found = watchdog_error(team, await _last_lines(fleet, team))
    if found is None:
        return failure
    records = await _collected(fleet, directory, team)
    if records is None:
        return found
    return type(found)(
        f"{found} What each rank called last is in {records}: `torchfrtrace {directory.path / records} --prefix "
        f"{RECORD_PREFIX}` compares them."
    )


@contextlib.contextmanager
def naming_failures(fleet: Fleet, directory: RunDirectory) -> Iterator[None]:
    """Give the failure of a block that starts ranks, or calls them, its name. For callers without an event loop of
    their own."""
    try:
        yield
    except PenstockError as error:
        for team in fleet.teams(*GANGS):
            named = run_in_thread(named_failure(fleet, directory, team, error))
            if named is not error:
                raise named from None
        raise


async def _last_lines(fleet: Fleet, team: Sequence[str]) -> dict[str, list[str]]:
    """Last lines of the ranks whose node is there, by name."""
    agents = {name: found for name in team if (found := fleet.agent_of(name)) is not None}
    calls = []
    for agent, handle in dict(agents.values()).items():
        names = [name for name, found in agents.items() if found[0] == agent]
        calls.append((agent, handle.take_end.remote(names)))
    answers = await outcomes(calls, phase="read the ranks' last lines", timeout_s=READ_S)
    return {name: lines for answer in answers if isinstance(answer, dict) for name, lines in answer.items()}


async def _collected(fleet: Fleet, directory: RunDirectory, team: Sequence[str]) -> str | None:
    """Bring what the watchdog has written to the run's directory. Returns the folder's name in it; None: it has written
    nothing, or that cannot be brought."""
    stage = str(fleet.plan_of(team[0]).stage)
    name = f"stacks/{team[0]}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    with contextlib.suppress(PenstockError):
        await fleet.collect(str(directory.path / name), dict.fromkeys(team, records_of(fleet.agents.root, stage)))
    return name if _has_files(directory.path / name) else None


def _has_files(folder: Path) -> bool:
    """Return whether a folder has files; an empty one is removed."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    return folder.is_dir()
