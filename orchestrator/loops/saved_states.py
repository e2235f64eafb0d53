"""The states that a session's loop saves: what its trainer goes on from, bit for bit.

    states/NAME/trainer/      weights, optimizer and counters in shards, written by the ranks
    states/NAME/state.json    files with their checksums, counters of the loop; written last: without it none is there

Below the run's directory, or its URL. A state may be loaded by any number of ranks, in another session too.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from penstock.conf.errors import CheckpointError, DamagedCheckpoint, DataError, PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import GRACE_S, answers
from penstock.orchestrator.loops.verbs import check_name
from penstock.orchestrator.run_directory.checkpoint import trainer_directory
from penstock.workers.machine.files import SavedFile, absolute, exists, read_text, remove, sync, write_text

MANIFEST = "state.json"
FORMAT = 1


class SavedStates:
    """Lifecycle: `save` and `load`, one call at a time, over a fleet that has started."""

    def __init__(self, fleet: Fleet, place: str, timeout_s: float) -> None:
        """`place`: the directory or URL of all states. `timeout_s`: deadline of a save."""
        self._fleet, self._place, self._timeout_s = fleet, place, timeout_s

    async def save(self, name: str, counters: Mapping[str, int]) -> str:
        """Save the present state under a new name, with counters of the loop. Returns its path. Raises `DataError` for
        a name that is taken, `CheckpointError`, `DeadlineExceeded`."""
        path = f"{self._place}/{check_name(name)}"
        if exists(f"{path}/{MANIFEST}"):
            raise DataError(f"{path} is there already: states are not overwritten. Choose another name.")
        remove(path)
        directory = trainer_directory(path)
        places = await self._fleet.places(directory)
        try:
            files = await self._written(places)
            await self._fleet.collect(directory, places)
            told = {"format": FORMAT, "files": [asdict(file) for file in files], "counters": dict(counters)}
            await asyncio.to_thread(sync, directory)
            write_text(f"{path}/{MANIFEST}", json.dumps(told, indent=1))
        except BaseException:
            with contextlib.suppress(PenstockError, OSError):
                await self._fleet.discard(directory, places)
                remove(path)
            raise
        return path

    async def load(self, path: str) -> dict[str, int]:
        """Go on from a state. Returns the counters that were saved with it. Raises `DataError` where there is none,
        `CheckpointError` for one that is damaged or of another model; then nothing has changed."""
        path = absolute(path)
        files, counters = _read(path)
        places = self._fleet.provided(trainer_directory(path))
        calls = [(name, handle.resume.remote(places[name], files)) for name, handle in self._fleet.role("trainer")]
        await answers(calls, phase=f"load {path}", timeout_s=self._fleet.config.rollout.start_timeout_s)
        return counters

    async def _written(self, places: Mapping[str, str]) -> list[SavedFile]:
        trainers, epoch = self._fleet.role("trainer"), self._fleet.owner.epoch
        begins = [(name, handle.begin_saving.remote(places[name], epoch)) for name, handle in trainers]
        if not all(await answers(begins, phase="save", timeout_s=self._timeout_s)):
            raise CheckpointError(
                f"an earlier save has missed its deadline (checkpoint.timeout_s={self._timeout_s:g}) and is still "
                "being written. See whether the run's directory answers, and save again."
            )
        ends = [(name, handle.finish_saving.remote()) for name, handle in trainers]
        saved = await answers(ends, phase="save", timeout_s=self._timeout_s + GRACE_S)
        return [file for files in saved for file in files]


def _read(path: str) -> tuple[list[SavedFile], dict[str, int]]:
    """The files and counters of a state."""
    try:
        told = json.loads(read_text(f"{path}/{MANIFEST}"))
    except FileNotFoundError:
        raise DataError(f"{path}: no state is there. Give the path that `save` has returned.") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}/{MANIFEST} is no JSON: {error}. Load another state.") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise CheckpointError(f"{path}/{MANIFEST} is not of format {FORMAT}: another version of Penstock wrote it.")
    return [SavedFile(**file) for file in told["files"]], dict(told["counters"])
