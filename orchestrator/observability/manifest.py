"""The manifest of a run, `manifest.json`: what decides its bits, so that it can be made again.

    start   configuration as it was resolved, threads, places of actors ─┐
    beside  processors and settings of ranks and engines, the data,      ├─▶ manifest.json
            packages, code, models                                       ┘

`penstock reproduce` takes the run's choices from it (`orchestrator/reproduce.py`), and it and `penstock diff` list what
differs between two. A run that is resumed keeps its first manifest; what has changed since is an event.
"""

import contextlib
import json
import platform
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import xxhash
import yaml
from ray.exceptions import RayError

from penstock.conf.errors import PenstockError
from penstock.conf.run import RunConfig
from penstock.conf.secret import hide_lines
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import get_from_all
from penstock.orchestrator.observability.differences import differing
from penstock.orchestrator.run_directory.json_lines import json_of, plain
from penstock.orchestrator.run_directory.run_directory import LOADER, RunDirectory, to_yaml
from penstock.workers.models.model_files import CONFIG, model_files
from penstock.workers.user_code import file_of

FILE, PATCH = "manifest.json", "code.patch"
DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color")
"""Words of git for a patch that can be applied, whatever the user's settings."""
CHANGED = "manifest_changed"
"""Kind of the event of a run that is resumed under other conditions, with `differing`."""
MOST_HASHED = 2**30
"""Largest size of a model, in bytes, whose hash is in the manifest from the beginning; a larger one takes its place
there once it is made."""
MOST_PATCH = 2**20
"""Largest size of a patch that is kept, in bytes; of a larger one only the hash."""
ANSWER_S, GIT_S, END_S = 60.0, 20.0, 10.0
"""Deadlines of actors, of a call of git, and of the manifest at the end of a run, in seconds."""
COMPUTING = ("rollout", "trainer", "scorer")
UNCOMPARED = ("config.name", "config.output_dir")


def read_manifest(run: Path) -> dict[str, Any]:
    """The manifest of a run; empty where there is none that can be read."""
    try:
        found = json.loads((run / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def manifest_differences(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What differs between the manifests of runs: each run's value, by dotted key."""
    found = differing(manifests)
    return {key: row for key, row in found.items() if key not in UNCOMPARED}


class ManifestWriter:
    """Lifecycle: within `writing`, once the fleet has started: a thread writes, and the end of the block waits for it,
    but not for the hash of a large model."""

    def __init__(self, fleet: Fleet, config: RunConfig, model_path: str, directory: RunDirectory) -> None:
        self._fleet, self._config, self._model_path, self._directory = fleet, config, model_path, directory
        self._is_written = threading.Event()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        chosen = chosen_by(self._fleet)
        threading.Thread(target=self._write, args=(chosen,), name="manifest", daemon=True).start()
        try:
            yield
        finally:
            self._is_written.wait(END_S)

    def _write(self, chosen: dict[str, Any]) -> None:
        directory, config = self._directory, self._config
        try:
            with directory.failed_writes.tolerating("manifest", "The run cannot be made again from it."):
                code, patches = code_of((Path.cwd(), Path(__file__).resolve().parent), _git)
                values = yaml.load(to_yaml(config), LOADER)
                models = {name: Path(path) for name, path in self._models().items()}
                most = float("inf") if (directory.path / FILE).is_file() else MOST_HASHED
                made = {
                    "code": {"version": version("penstock"), **code, "files": hashes_of_files(files_named_in(values))},
                    "lock": {"python": platform.python_version()}
                    | dict(sorted((one.name, one.version) for one in distributions())),
                    **self._processes(),
                    "models": {name: model_identity(path, most) for name, path in models.items()},
                    "chosen": chosen,
                    "config": values,
                }
                self._keep(made, patches)
                self._is_written.set()
                if large := [name for name, one in made["models"].items() if one.keys() == {"bytes"}]:
                    made["models"] |= {name: model_identity(models[name]) for name in large}
                    self._keep(made, patches)
        except (PenstockError, RayError, subprocess.SubprocessError, ValueError) as error:
            directory.event("recording_failed", what="manifest", error=str(error))
        finally:
            self._is_written.set()

    def _keep(self, made: dict[str, Any], patches: str) -> None:
        """Write the manifest, unless the run has one of before; then what differs is an event."""
        directory, made = self._directory, plain(made)
        if (before := read_manifest(directory.path)) and not _is_unfinished(before, made):
            if found := manifest_differences({"before": before, "now": made}):
                directory.event(CHANGED, differing=found)
            return
        if patches:
            directory.write_text(PATCH, hide_lines(patches))
        directory.write_text(FILE, json.dumps(made, indent=1, ensure_ascii=False) + "\n")

    def _models(self) -> dict[str, str]:
        model = self._config.model
        reference = {"reference": model.reference_path} if model.reference_path else {}
        return {"policy": self._model_path, **reference, **model.paths}

    def _processes(self) -> dict[str, Any]:
        """What the actors say: of those that compute by role, and of the data."""
        found: dict[str, Any] = {"processes": {}, "data": None}
        for role in COMPUTING:
            if members := self._fleet.role(role):
                facts = get_from_all(members, "numerics", phase="describe processes", timeout_s=ANSWER_S)
                found["processes"][role] = merged(facts)
        if prompts := self._fleet.role("prompts"):
            (identity,) = get_from_all(prompts, "identity", phase="identify the data", timeout_s=ANSWER_S)
            found["data"] = {"rows": identity.rows, "parts": {k: vars(part) for k, part in identity.parts.items()}}
        return found


def _is_unfinished(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether `before` is the same manifest, without the hash of a large model."""
    return before == {**now, "models": before.get("models")} and before != now


def chosen_by(fleet: Fleet) -> dict[str, Any]:
    """What a run has chosen itself: threads and nodes of actors, and how the dataflow is made up."""
    names = [actor.name for actor in fleet.plan if actor.role in COMPUTING]
    titles = fleet.reservation.assignment.titles
    return {
        "threads": {name: fleet.threads_of(name) for name in names},
        "nodes": {name: titles[name] for name in names if name in titles},
        "dataflow": [stage.name for stage in fleet.flow.stages],
    }


def merged(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of several processes: a value that is the same in all, or a list of the different ones.

    >>> merged([{"cpu": "EPYC", "onednn": True}, {"cpu": "Xeon", "onednn": True}])
    {'cpu': ['EPYC', 'Xeon'], 'onednn': True}
    """
    result: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in facts for key in one):
        values = {json_of(one.get(key)): one.get(key) for one in facts}
        result[key] = next(iter(values.values())) if len(values) == 1 else [values[text] for text in sorted(values)]
    return result


def code_of(places: Iterable[Path], git: Any) -> tuple[dict[str, Any], str]:
    """The commit and the hash of the local changes of the repositories that these places are in, by their
    directories, and the changes. `git(place, *words)`: the output of git, None where it has none."""
    found: dict[str, Any] = {}
    patches = ""
    for place in places:
        if (top := git(place, "rev-parse", "--show-toplevel")) is None or top.strip() in found:
            continue
        root, commit = Path(top.strip()), git(place, "rev-parse", "HEAD")
        patch = (git(root, *DIFF, "HEAD") or "") if commit else ""
        found[top.strip()] = {"commit": (commit or "").strip(), "diff": _hash(patch.encode()) if patch else ""}
        patches += patch if len(patch) <= MOST_PATCH else ""
    return found, patches


def _git(place: Path, *words: str) -> str | None:
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "-C", place, *words], capture_output=True, timeout=GIT_S, check=False)
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None
    return None


def files_named_in(value: Any) -> set[Path]:
    """Files of code that a configuration names, and those beside them, which they may import."""
    if isinstance(value, Mapping):
        return {file for key, one in value.items() for file in files_named_in(one)}
    if isinstance(value, list):
        return {file for one in value for file in files_named_in(one)}
    name = file_of(value) or (value if value.endswith(".py") else "") if isinstance(value, str) else ""
    return {*Path(name).parent.glob("*.py")} if name and Path(name).is_file() else set()


def hashes_of_files(files: Iterable[Path]) -> dict[str, str]:
    return {str(file): _hash(file.read_bytes()) for file in sorted(files)}


def model_identity(path: Path, most_bytes: float = float("inf")) -> dict[str, Any]:
    """The commit of a model in the hub's cache, else the hash of a directory's files, unless they are more than
    `most_bytes`."""
    directory = path if path.is_dir() else _cached(str(path))
    if directory is None:
        return {"path": str(path)}
    if directory.parent.name == "snapshots":
        return {"commit": directory.name}
    names = model_files(directory)
    size = sum((directory / name).stat().st_size for name in names)
    if size > most_bytes:
        return {"bytes": size}
    digest = xxhash.xxh3_128()
    for name in sorted(names):
        digest.update(f"{name} {(directory / name).stat().st_size} ".encode())
        with (directory / name).open("rb") as opened:
            while piece := opened.read(2**24):
                digest.update(piece)
    return {"bytes": size, "hash": digest.hexdigest()}


def _cached(name: str) -> Path | None:
    """The directory of a hub's model in this machine's cache."""
    from huggingface_hub import try_to_load_from_cache  # late: only runs that name a hub's model need the hub

    with contextlib.suppress(ValueError):  # no name of the hub
        found = try_to_load_from_cache(name, CONFIG)
        return Path(found).parent if isinstance(found, str) else None
    return None


def _hash(data: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))
