"""The tracker trackio: a database here, or a server or a Space by TRACKIO_SERVER_URL or TRACKIO_SPACE_ID."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.conf.tracking import TrackioConfig
from penstock.orchestrator.observability.reporting.sinks.tracker import DEFAULT_PROJECT, FAILED, About, End, Opened


class Trackio:
    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: Any = None
        self._last = 0

    def open(self, about: About, id: str | None) -> Opened:
        wanted = _absolute(self._config.directory) if self._config.directory is not None else None
        if wanted is not None:
            os.environ["TRACKIO_DIR"] = str(wanted)  # read as trackio is imported
        import trackio  # late: half a second, and only where it is asked for

        if wanted is not None and wanted != trackio.utils.TRACKIO_DIR:
            raise ConfigError(
                f"tracking.trackio.directory={self._config.directory}: trackio has been imported before, and writes to "
                f"{trackio.utils.TRACKIO_DIR}. Set TRACKIO_DIR for the whole process."
            )
        project = about.project or DEFAULT_PROJECT
        self._run = trackio.init(
            project=project,
            name=about.name,
            group=about.group,
            config={**about.config, "tags": dict(about.tags)},
            resume="allow" if id else "never",
            embed=False,
        )
        where = f"TRACKIO_DIR={wanted} " if wanted is not None else ""
        return Opened(self._run.id, f"{where}trackio show --project {project}")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._last = step
        self._run.log(dict(numbers), step=step)

    def finish(self, end: End) -> None:
        import trackio

        text = "\n".join(f"- **{name}**: {value}" for name, value in end.facts().items() if value)
        self._run.log({"end": trackio.Markdown(text)}, step=self._last)
        if end.state == FAILED:
            self._run.alert("the run has failed", end.error, level=trackio.AlertLevel.ERROR, step=self._last)
        self._run.finish()


def _absolute(directory: str) -> Path:
    return Path(directory).expanduser().resolve()
