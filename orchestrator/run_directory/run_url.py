"""Looks at what there is at a run's URL, before this machine has anything of it."""

from collections.abc import Collection

from penstock.workers.files import exists, list_names, remove

RESULTS = ("metrics.jsonl", "model", "checkpoints", "samples")
"""Names of results that would be costly to make again."""


def has_begun_at(url: str) -> bool:
    """Return whether there is a run with results. Raises `CheckpointError` if that cannot be told."""
    names = list_names(url)
    return "config.yaml" in names and (
        any(name in RESULTS for name in names) or any(exists(f"{url}/{name}/config.yaml") for name in names)
    )


def made_free(url: str, made: Collection[str]) -> bool:
    """Return whether a new run may be there. What a run without results left is removed. Raises `CheckpointError`."""
    if has_begun_at(url):
        return False
    names = list_names(url)
    if "config.yaml" in names:
        for name in names:
            if name in made:
                remove(f"{url}/{name}")
    return True
