"""Models of the Hugging Face hub: each node fetches one into its cache before actors are made that read it.

    driver: fetch(name, revision) ─▶ each node's agent: which files ─▶ room? ─▶ download ─▶ the snapshot's directory
            fetched()             ─▶ bytes so far

Actors then read a directory, and ask no server: all see the same revision, and one that is started again needs no hub.
What was fetched before an interruption stays in the cache.
"""

import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.conf.errors import ResourceError
from penstock.workers.models.model_files import CONFIG, files_of_model, weight_files

Fetched = tuple[int, int]
"""Bytes that have come, and bytes that were missing at the beginning."""


class HubModels:
    """Lifecycle: `fetch` in one thread at a time, `fetched` in any."""

    def __init__(self) -> None:
        self._blobs: Path | None = None
        """Folder of the cache that receives the present model's files; None: nothing is missing."""
        self._before = self._missing = 0

    def fetch(self, name: str, revision: str | None) -> str:
        """Return the directory of a model, once all of it is there. `revision`: the commit; None: the newest. Raises
        `ResourceError`."""
        from huggingface_hub.errors import HfHubHTTPError  # late: only runs that name a hub's model need the hub

        try:
            directory = self._fetch(name, revision)
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise ResourceError(
                f"{platform.node()}: {name} could not be fetched from the Hugging Face hub: {_first_line(error)}. Let "
                "the node reach the hub (HF_ENDPOINT for a mirror, HF_TOKEN for a gated model), or set model.path to a "
                "directory of the driver's machine: it is copied to the nodes."
            ) from None
        finally:
            self._blobs = None
        return str(directory)

    def fetched(self) -> Fetched:
        """Bytes of the model that is being fetched; zeros where none is."""
        blobs = self._blobs
        if blobs is None:
            return 0, 0
        return max(0, min(_size_of(blobs) - self._before, self._missing)), self._missing

    def _fetch(self, name: str, revision: str | None) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError

        try:
            there = snapshot_download(name, revision=revision, dry_run=True)
        except DryRunError as error:  # no way to the hub: what is in the cache has to do
            try:
                return _checked(Path(snapshot_download(name, revision=revision, local_files_only=True)))
            except (OSError, ValueError) as absent:
                raise OSError(f"{_first_line(error.__cause__ or error)} (cache: {_first_line(absent)})") from None
        names = files_of_model(file.filename for file in there)
        self._begin([file for file in there if file.filename in names and file.will_download])
        commit = there[0].commit_hash if there else revision
        return _checked(Path(snapshot_download(name, revision=commit, allow_patterns=names)))

    def _begin(self, files: Sequence[Any]) -> None:
        """Note what is missing. Raises `OSError` where it has no room."""
        self._missing = sum(file.file_size or 0 for file in files)
        if not files:
            return
        snapshots = next(path for path in Path(files[0].local_path).parents if path.name == "snapshots")
        blobs = snapshots.parent / "blobs"
        self._before = _size_of(blobs)
        existing = next(path for path in (blobs, *blobs.parents) if path.is_dir())
        free = shutil.disk_usage(existing).free
        if free < self._missing:
            raise OSError(
                f"{self._missing:,} bytes are missing, and {existing} has room for {free:,} (HF_HOME is another place)"
            )
        self._blobs = blobs


def _checked(directory: Path) -> Path:
    """The directory. Raises `OSError` where part of a model is missing."""
    weights = weight_files(directory)
    absent = [name for name in (CONFIG, *weights) if not (directory / name).is_file()]
    if not weights:
        absent.append("its weights")
    if absent:
        raise OSError(f"{directory} lacks {', '.join(absent)}")
    return directory


def _size_of(folder: Path) -> int:
    """Bytes on the disk of all files of a folder, unfinished ones included."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_blocks * 512 for entry in entries if entry.is_file())
    except OSError:  # not made yet, or a file was renamed meanwhile
        return 0


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def may_be_hub_id(path: str) -> bool:
    """Return whether a path that is not there can be a model's name at the hub."""
    return not path.startswith((".", "/", "~")) and path.count("/") <= 1


def cached_revision(name: str) -> str | None:
    """The commit of a model whose configuration is in this machine's cache; None: it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, CONFIG)
    return Path(found).parent.name if isinstance(found, str) else None
