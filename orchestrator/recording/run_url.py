"""What there is at a run's URL before this machine has anything of it. Called by `run_directory.py`."""

from collections.abc import Collection

from penstock.workers.files import exists, list_names, remove

RESULTS = ("metrics.jsonl", "model", "checkpoints", "samples")
"""What one would not make again for nothing."""


def has_begun_at(url: str) -> bool:
    """Whether a run is there that has come to something. Raises `CheckpointError` if that cannot be told."""
    names = list_names(url)
    return "config.yaml" in names and (
        any(name in RESULTS for name in names) or any(exists(f"{url}/{name}/config.yaml") for name in names)
    )


def made_free(url: str, made: Collection[str]) -> bool:
    """Whether a new run may be there. What one left that came to nothing is removed. Raises `CheckpointError`."""
    if has_begun_at(url):
        return False
    names = list_names(url)
    if "config.yaml" in names:
        for name in names:
            if name in made:
                remove(f"{url}/{name}")
    return True
