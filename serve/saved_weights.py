"""Weights that clients have saved, each a directory of the run directory:

    checkpoints/RUN/weights/NAME/           state-N.safetensors, checkpoint.json: with optimizer
    checkpoints/RUN/sampler_weights/NAME/   the same, weights alone

Clients name them tinker://RUN/weights/NAME. Each save has a file of its own, by the number N of its request, and
`checkpoint.json` names the newest. It is written last, so an overwrite is atomic. Older saves stay as long as sampling
sessions use them. A state is a file of safetensors, whose metadata has its spec and its number of steps; it is complete
or absent, after a power cut too.
"""

import contextlib
import json
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save, save_file

from penstock.conf.errors import DataError
from penstock.orchestrator.loops.verbs import NAME
from penstock.serve.journal import JournalError, disk_errors
from penstock.workers.protocols import AdapterSpec, AdapterState
from penstock.workers.rollout.named_adapters import peft_files
from penstock.workers.runtime.local_files import replacing, write_whole
from penstock.workers.weights.publication.costs import WHOLE_NAME

SCHEME = "tinker://"
FOLDERS = {"weights": "training", "sampler_weights": "sampler"}
STATE, FACTS = "state.safetensors", "checkpoint.json"
"""Names of a training state in an archive and in the version before, and of the facts."""


class NotFound(DataError):
    """Something that is not there, or not the tenant's."""


@dataclass(frozen=True)
class WeightsAddress:
    """The name of a checkpoint."""

    run: str
    folder: str
    name: str

    @classmethod
    def parse(cls, path: str) -> "WeightsAddress":
        """Parse tinker://RUN/weights/NAME. Raises `NotFound`."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in FOLDERS or not NAME.fullmatch(parts[2]):
            raise NotFound(f"{path[:200]!r} is no path of weights here: {SCHEME}RUN/weights/NAME or "
                               f"{SCHEME}RUN/sampler_weights/NAME.")  # fmt: skip
        return cls(*parts)

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run}/{self.folder}/{self.name}"


@dataclass(frozen=True)
class Checkpoint(WeightsAddress):
    """The facts of a checkpoint. Times in seconds since 1970."""

    seq: int
    """Number of the request that saved it."""
    time: float
    size_bytes: int
    expires: float | None = None
    metadata: dict[str, str] | None = None
    file: str = STATE
    """File of the state, beside the facts."""

    @property
    def save(self) -> str:
        """Name of the save: its file, below the directory of all."""
        return f"{_safe(self.run)}/{self.folder}/{self.name}/{self.file}"

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires <= time.time()

    def sdk_fields(self) -> dict[str, Any]:
        """The checkpoint as the SDK reads it."""
        return {
            "checkpoint_id": f"{self.folder}/{self.name}", "checkpoint_type": FOLDERS[self.folder],
            "time": iso(self.time), "tinker_path": self.path, "size_bytes": self.size_bytes, "public": False,
            "user_metadata": self.metadata, "expires_at": iso(self.expires) if self.expires is not None else None,
        }  # fmt: skip


class Checkpoints:
    """The checkpoints of a run directory. All methods block: call them in a thread where states are read or written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        """Held while a save has a file and no name yet, and while old ones are looked for."""
        self._sizes: dict[str, int] = {}
        """Bytes of all saves by the directory of their run."""
        for run in directory.glob("*"):
            self._measure(run.name)

    def save(
        self, facts: Checkpoint, state: AdapterState, *, overwrite: bool,
        admit: Callable[[int], None] = lambda num_bytes: None,
    ) -> Checkpoint:  # fmt: skip
        """Save a state, unless this request has saved it before. `admit`: called with the bytes that it adds. Raises
        what that raises, and `DataError` if another request has saved one of that name."""
        with self._lock:
            present = self._find(facts)
            if present is not None and present.seq == facts.seq:
                return present
            if present is not None and not overwrite:
                raise DataError(f"{facts.path} is there already: choose another name, or pass overwrite=True.")
            added = sum(value.nbytes for value in state.tensors.values())
            admit(added - (present.size_bytes if present is not None else 0))
            file = f"state-{facts.seq}.safetensors"
            size = write_state(self._folder(facts) / file, state)
            self._measure(_safe(facts.run))
            return self._record(replace(facts, size_bytes=size, file=file))

    def get(self, address: WeightsAddress) -> Checkpoint:
        found = self._find(address)
        if found is None or found.is_expired:
            raise _missing(address)
        return found

    def state(self, address: WeightsAddress, *, with_optimizer: bool) -> AdapterState:
        file = self.file(address)
        if with_optimizer and address.folder != "weights":
            raise DataError(f"{address.path} has no optimizer: load it without, or a checkpoint of save_state.")
        return read_state(file, with_optimizer=with_optimizer)

    def file(self, address: WeightsAddress, save: str = "") -> Path:
        """File of a save, by default the newest. Raises `NotFound`."""
        file = self._directory / (save or self.get(address).save)
        if not file.exists():
            raise _missing(address)
        return file

    def checkpoints_of(self, *runs: str) -> list[Checkpoint]:
        """All of training runs, oldest first."""
        found = [one for run in runs for one in self._all(_safe(run)) if not one.is_expired]
        return sorted(found, key=lambda one: (one.time, one.seq))

    def num_bytes(self, runs: Iterable[str]) -> int:
        """Bytes of all saves of training runs, also of those that no name stands for any more."""
        return sum(self._sizes.get(_safe(run), 0) for run in runs)

    def expired(self) -> list[WeightsAddress]:
        """Addresses of those whose time is over, and that still take room."""
        return [one for one in self._all("*") if one.is_expired]

    def expire(self, address: WeightsAddress, ttl_s: int | None) -> None:
        """Set the time after which a checkpoint is gone; None: never."""
        self._record(replace(self.get(address), expires=None if ttl_s is None else time.time() + ttl_s))

    def delete(self, address: WeightsAddress) -> Path:
        """Delete a name and its newest save, expired or not. Returns the file of the save. Raises `NotFound`."""
        facts = self._find(address)
        if facts is None:
            raise _missing(address)
        (self._folder(address) / FACTS).unlink()
        return self.remove(facts.save)

    def superseded_saves(self, address: WeightsAddress | None = None) -> list[str]:
        """Saves that a name no longer stands for; None: of all names."""
        folders = self._directory.glob("*/*/*") if address is None else [self._folder(address)]
        found = []
        with self._lock:
            for folder in folders:
                facts = self._find(WeightsAddress(*folder.parts[-3:]))
                kept = {FACTS, facts.file} if facts is not None else set()
                found += [file for file in folder.glob("[!.]*") if file.name not in kept]
        return sorted(str(file.relative_to(self._directory)) for file in found)

    def remove(self, save: str) -> Path:
        """Remove a save, and its directory with the last one. Returns its file."""
        file = self._directory / save
        with self._lock:
            file.unlink(missing_ok=True)
            self._measure(save.partition("/")[0])
        with contextlib.suppress(OSError):
            file.parent.rmdir()
        return file

    def archive(self, address: WeightsAddress) -> Iterator[bytes]:
        """A tar of a checkpoint, in parts: the adapter as PEFT reads it, and for training its whole state."""
        facts, state = self.get(address), self.state(address, with_optimizer=address.folder == "weights")
        is_whole, weights = state.spec.is_whole, state.weights()
        files = {WHOLE_NAME: save(weights, {"format": "pt"})} if is_whole else peft_files(state)
        files[FACTS] = json.dumps(asdict(replace(facts, file=STATE))).encode()
        if address.folder == "weights":
            files[STATE] = self.file(address).read_bytes()
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), int(facts.time)
            yield entry.tobuf()
            yield data + bytes(-len(data) % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)

    def _all(self, runs: str) -> list[Checkpoint]:
        """Those of the runs whose directories a pattern names."""
        files = self._directory.glob(f"{runs}/*/*/{FACTS}")
        found = (self._find(WeightsAddress(*file.parts[-4:-1])) for file in files)
        return [one for one in found if one is not None]

    def _measure(self, run: str) -> None:
        self._sizes[run] = sum(file.stat().st_size for file in self._directory.glob(f"{run}/*/*/state*"))

    def _find(self, address: WeightsAddress) -> Checkpoint | None:
        """The facts of a checkpoint; None if there is none. Raises `JournalError`."""
        file = self._folder(address) / FACTS
        try:
            with disk_errors(file):
                return Checkpoint(**json.loads(file.read_text()))
        except JournalError:
            if file.exists():
                raise
            return None

    def _record(self, facts: Checkpoint) -> Checkpoint:
        file = self._folder(facts) / FACTS
        with disk_errors(file):
            write_whole(file, json.dumps(asdict(facts)), synced=True)
        return facts

    def _folder(self, address: WeightsAddress) -> Path:
        return self._directory / _safe(address.run) / address.folder / address.name


def _missing(address: WeightsAddress) -> NotFound:
    return NotFound(f"{address.path}: there is no such checkpoint. `list_checkpoints` lists them.")


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _safe(run: str) -> str:
    """The name of a training run as the name of a directory."""
    if not NAME.fullmatch(run.replace(":", "_")):
        raise NotFound(f"{run[:100]!r} is no training run of this server.")
    return run.replace(":", "_")


def write_state(file: Path, state: AdapterState) -> int:
    """Write a state; returns its size in bytes. Raises `JournalError`."""
    metadata = {"spec": json.dumps(asdict(state.spec)), "num_steps": str(state.num_steps)}
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in state.tensors.items()}
    try:
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, synced=True) as part:
                save_file(tensors, part, metadata)
            return file.stat().st_size
    except SafetensorError as error:
        raise JournalError(f"{file}: {error}. Make room; it is tried again.") from error


def read_state(file: Path, *, with_optimizer: bool = True) -> AdapterState:
    """Read a state; without optimizer its weights alone. Raises `DataError`, `JournalError`."""
    with _opened(file) as source:
        spec, num_steps = _metadata(source)
        names = [name for name in source.keys() if with_optimizer or name.startswith("weights/")]  # noqa: SIM118
        tensors = {name: source.get_tensor(name) for name in names}
    return AdapterState(spec, tensors, num_steps if with_optimizer else 0)


def read_spec(file: Path) -> AdapterSpec:
    """The spec alone. Raises `DataError`, `JournalError`."""
    with _opened(file) as source:
        return _metadata(source)[0]


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with disk_errors(file), file.open("rb"), safe_open(file, framework="numpy") as source:  # which names no cause
            yield source
    except (JournalError, SafetensorError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, JournalError) and file.exists():
            raise
        raise DataError(f"{file.name} cannot be read: {error}.") from error


def _metadata(source: Any) -> tuple[AdapterSpec, int]:
    metadata = source.metadata()
    return AdapterSpec(**json.loads(metadata["spec"])), int(metadata["num_steps"])
