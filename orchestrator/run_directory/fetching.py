"""Fetches a run from its URL into its working copy, to continue it on this machine. `penstock report` and other
commands read a run by `open_at`.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from penstock.conf.errors import CheckpointError, ConfigError, RunInUse
from penstock.conf.tracking import TrackingConfig
from penstock.orchestrator.run_directory.mirror import (
    EVENTS,
    METRICS,
    Mirror,
    MirrorRecord,
    RunRecords,
    is_ahead,
    is_fetched,
    stamp_of,
    whole_lines,
)
from penstock.orchestrator.run_directory.run_directory import RUN_ID, RunDirectory
from penstock.orchestrator.run_directory.run_lock import FILE, RunLock
from penstock.orchestrator.run_directory.run_place import RunPlace
from penstock.workers.runtime.url_files import download, exists, find, read_optional

RECORDS = ("config.yaml", RUN_ID, METRICS, "cluster.json", EVENTS)
"""Files that readers of a run need."""


def fetch_run(place: RunPlace) -> None:
    """Fetch the run's newest state into its working copy: what is at the URL replaces it if another machine has
    continued the run. Raises `RunInUse`, `CheckpointError`."""
    if place.url is None or not _is_ahead(place.path, place.url):
        return
    lock = RunLock.take(place.path, place.url)
    try:
        if _is_ahead(place.path, place.url):
            _replace(place.path, place.url)
    finally:
        lock.release()


@contextlib.contextmanager
def open_at(run: str, *, more: Callable[[Sequence[str]], Iterable[str]] = lambda names: ()) -> Iterator[RunDirectory]:
    """Open the run in a directory or at a URL for reading. A run at a URL is read in its working copy if that is as
    new, otherwise in a temporary copy. `more`: selects, from all files' names, those that are wanted beside the
    records. Raises `ConfigError` if there is no run, `CheckpointError` if the URL does not answer."""
    place = RunPlace.at(run)
    if place.url is None:
        yield RunDirectory.open(run)
        return
    if not _is_ahead(place.path, place.url) and (place.path / "config.yaml").is_file():
        yield RunDirectory.open(place.path, place.url)
        return
    if not exists(f"{place.url}/config.yaml"):
        raise ConfigError(f"{place.url}: there is no run. A run is at output_dir/name, and has a config.yaml.")
    with tempfile.TemporaryDirectory(prefix="penstock-run-") as folder:
        copy, names = Path(folder, place.path.name), find(place.url)
        _fetch(copy, place.url, [*(name for name in RECORDS if name in names), *more(names)])
        yield RunDirectory.open(copy, place.url)


def fetch_files(directory: RunDirectory, names: Iterable[str]) -> None:
    """Fetch further files of a run at a URL, unless they are here; one that cannot be fetched is left out."""
    record = MirrorRecord.of(directory.path, directory.url or "")
    for name in names if directory.url else ():
        if not (directory.path / name).exists():
            with contextlib.suppress(CheckpointError):
                download(f"{directory.url}", directory.path, [name])
                record.files[name] = stamp_of(directory.path / name)
                record.write(directory.path)


def upload_all(directory: RunDirectory) -> None:
    """Upload what is in a run's working copy, or was made in a copy of it, and is missing at its URL. A process that
    works in it does so itself. Raises `CheckpointError` that names what could not be uploaded."""
    assert directory.url is not None
    try:
        lock = RunLock.take(directory.path, directory.url)
    except RunInUse:
        return
    try:
        told: list[str] = []
        directory.failed_writes.set_printer(told.append)
        if missing := Mirror(directory.path, directory.url, TrackingConfig(), directory.failed_writes).upload_due(
            everything=True
        ):
            raise CheckpointError(f"{directory.url}: {len(missing)} file(s) could not be uploaded. {' '.join(told)}")
    finally:
        lock.release()


def _is_ahead(path: Path, url: str) -> bool:
    events = read_optional(f"{url}/{EVENTS}")
    remote = None if events is None else RunRecords(events, read_optional(f"{url}/{METRICS}") or b"")
    local = RunRecords(_local(path / EVENTS), _local(path / METRICS)) if (path / EVENTS).is_file() else None
    return is_ahead(remote, local)


def _local(file: Path) -> bytes:
    return whole_lines(file.read_bytes()) if file.is_file() else b""


def _replace(path: Path, url: str) -> None:
    """Replace a working copy by what is at the URL. Events come last: a copy without them is fetched again."""
    for entry in path.iterdir():
        if entry.name == FILE:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    names = sorted(filter(is_fetched, find(url)), key=lambda name: (name == EVENTS, name))
    _fetch(path, url, names)


def _fetch(path: Path, url: str, names: Sequence[str]) -> None:
    download(url, path, names)
    MirrorRecord(url, {name: stamp_of(path / name) for name in names}).write(path)
