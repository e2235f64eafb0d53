"""The place of a run: its directory on this machine, its URL if it has one, and whether a run is there already.

output_dir=runs              runs/<name>
output_dir=s3://bucket/runs  s3://bucket/runs/<name>, with a working copy in ~/.cache/penstock/runs/<hash>/<name>
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.run_directory.mirror import url_of
from penstock.workers.runtime.url_files import exists, is_url, list_names, remove

HASH_LENGTH = 16
RESULTS = ("metrics.jsonl", "model", "checkpoints", "samples", "states")
"""Names of results that would be costly to make again."""


@dataclass(frozen=True)
class RunPlace:
    path: Path
    """The directory that the run works in."""
    url: str | None = None
    """The URL that the directory is mirrored to."""

    @classmethod
    def of(cls, output_dir: str, name: str) -> "RunPlace":
        if is_url(output_dir):
            return cls(working_copies(output_dir) / name, join_url(output_dir, name))
        path = Path(output_dir).expanduser().resolve() / name
        return cls(path, url_of(path.parent) and url_of(path))  # of the run that this one comes before

    @classmethod
    def of_run(cls, config: RunConfig) -> "RunPlace":
        """The place of a configured run, whose `config.name` is set."""
        return cls.of(config.output_dir, str(config.name))

    @classmethod
    def at(cls, run: str) -> "RunPlace":
        """The place of a run, by its directory or URL."""
        if not is_url(run):
            path = Path(run).expanduser().resolve()
            return cls(path)
        scheme, _, rest = run.partition("://")
        parent, _, name = rest.rstrip("/").rpartition("/")
        return cls.of(f"{scheme}://{parent}", checked_name(name))


def working_copies(url: str) -> Path:
    """The directory of the working copies of runs whose output_dir is this URL."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve()
    return cache / "penstock" / "runs" / hashlib.sha256(_without_slash(url).encode()).hexdigest()[:HASH_LENGTH]


def join_url(url: str, name: str) -> str:
    url = _without_slash(url)
    return f"{url}{name}" if url.endswith("://") else f"{url}/{name}"


def _without_slash(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"


def checked_name(name: str) -> str:
    """The name, if it can be a directory's. Raises `ConfigError`."""
    if not re.fullmatch(r"[\w.+@=-][\w.+@= -]*", name) or name in (".", ".."):
        raise ConfigError(
            f"name={name}: is to be a directory's name: letters, digits, '-', '_', '.'. Its place is output_dir."
        )
    return name


def place_error(path: Path, error: OSError, key: str = "output_dir") -> ConfigError:
    return ConfigError(f"{key}: cannot make {path} ({error.strerror}). Set {key} to a place that can be written.")


def try_place(directory: str | Path, key: str = "output_dir") -> Path:
    """Make a directory where those of runs are to be, and remove it. Returns the place. `key`: of the configuration, or
    a variable of the environment, that names it. Raises `ConfigError`."""
    path = Path(directory).expanduser().resolve()
    try:
        there = next(place for place in (path, *path.parents) if place.exists())
        with tempfile.TemporaryDirectory(dir=there, prefix=".penstock-"):
            return path
    except OSError as error:
        raise place_error(path, error, key) from None


def new_place(config: RunConfig, time_s: float, is_taken: Callable[[str], bool]) -> RunPlace:
    """A new place for a run without a name, in a new directory: two runs of the same second get two. `is_taken`: tells
    whether there is a run at a URL. Sets `config.name`. Raises `ConfigError`."""
    stem = f"{config.recipe_name}-{datetime.fromtimestamp(time_s):%Y%m%d-%H%M%S}"
    for count in range(1, 1000):
        place = RunPlace.of(config.output_dir, stem if count == 1 else f"{stem}-{count}")
        if place.url is not None and is_taken(place.url):
            continue
        try:
            place.path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise place_error(place.path, error) from None
        config.name = place.path.name
        return place
    raise ConfigError(f"{config.output_dir}/{stem}: a thousand runs of that name; set name=...")


def has_results_at(url: str) -> bool:
    """Return whether there is a run with results. Raises `CheckpointError` if the URL does not answer."""
    names = list_names(url)
    return "config.yaml" in names and (
        any(name in RESULTS for name in names) or any(exists(f"{url}/{name}/config.yaml") for name in names)
    )


def clear_unused(url: str, made: Collection[str]) -> bool:
    """Return whether a new run may be there. What a run without results left is removed. Raises `CheckpointError`."""
    if has_results_at(url):
        return False
    names = list_names(url)
    if "config.yaml" in names:
        for name in names:
            if name in made:
                remove(f"{url}/{name}")
    return True
