"""Keeps what a tracker needs to go on with a run in another process: `trackers/NAME.json` and `NAME.step`, in the
run's directory.

There are two files since the id is written once: so it is at the URL of a run long before its machine may be lost.
"""

import contextlib
import json

from penstock.orchestrator.run_directory.run_directory import RunDirectory

FOLDER = "trackers"


class Kept:
    """Lifecycle: read when made, `keep` once the tracker knows the run, `keep_step` with each step that it has.

    Raises no `OSError`: what cannot be written is told as a loss of the tracker.
    """

    def __init__(self, directory: RunDirectory, name: str) -> None:
        self._directory, self._name = directory, name
        self.id: str | None = None
        """The run's id in the tracker, of an earlier process."""
        self.step: int | None = None
        """The last step that an earlier process gave to the tracker."""
        folder = directory.path / FOLDER
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.id = str(json.loads((folder / f"{name}.json").read_text())["id"])
            self.step = int((folder / f"{name}.step").read_text())

    def keep(self, id: str) -> None:
        self.id = id
        self._write(f"{self._name}.json", json.dumps({"id": id}))

    def keep_step(self, step: int) -> None:
        self._write(f"{self._name}.step", str(step))

    def _write(self, file: str, text: str) -> None:
        with self._directory.losses.tolerating(FOLDER):
            (self._directory.path / FOLDER).mkdir(exist_ok=True)
            self._directory.write_text(f"{FOLDER}/{file}", text)
