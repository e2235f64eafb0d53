"""The weight files of an exported model: which have to be there, and no others. Light to import, since the driver uses
it too, which may be on another machine than the ranks that have written the files (`exporting.py`).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.conf.errors import WeightError
from penstock.workers.machine.files import fault_of_size
from penstock.workers.models.model_files import INDEX, SINGLE

SHARDS = "model-*-of-*.safetensors"


def shard_name(number: int, count: int) -> str:
    """Name of a shard. `number`: from 1, as transformers counts them."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def remove_weights(directory: Path, but: Iterable[str] = ()) -> None:
    """Remove what an earlier export has left: transformers would read it instead. `but`: names of files that stay."""
    kept = {directory / name for name in but}
    for file in (directory / SINGLE, directory / INDEX, *directory.glob(SHARDS)):
        if file not in kept:
            file.unlink(missing_ok=True)


def check_exported(directory: str, written: Iterable[Mapping[str, int]]) -> None:
    """Check that all written files are there, and remove others. `written`: by each rank, the names of its files and
    their bytes. Raises `WeightError`."""
    files = {name: num_bytes for own in written for name, num_bytes in own.items()}
    for name, num_bytes in files.items():
        if fault := fault_of_size(f"{directory}/{name}", num_bytes):
            raise WeightError(
                f"export: {directory}/{name} {fault} as this machine sees it, and a rank has written it. Whatever "
                "removes files there, try again, or make the model of a checkpoint: penstock export CHECKPOINT "
                "DIRECTORY."
            )
    remove_weights(Path(directory), files)
