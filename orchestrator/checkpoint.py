"""One checkpoint of a run: what its manifest says, and where it is.

`checkpointing/` writes, finds and opens them; `fleet/` starts actors from one.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.workers.files import SavedFile
from penstock.workers.prompts.source import PromptStart

FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete. What its manifest says, and where it is."""

    directory: str
    step: int
    """The last one that was taken; also the policy version."""
    prompts: PromptStart
    model_path: str
    """Where configuration and tokenizer, and the weights that were not trained, are."""
    model_paths: dict[str, str]
    files: list[SavedFile] = field(default_factory=list)
    """Of `trainer/`."""
    config: dict[str, Any] = field(default_factory=dict)
    """The run's, resolved."""
    head: str = "policy"
    """policy, or scores: what kind of model it is."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What was known of the last update: its line of metrics.jsonl, should the run die before it is written."""
    store_directory: str = ""
    """Where `store/` was brought to from a URL."""

    @property
    def trainer(self) -> str:
        return trainer_directory(self.directory)

    @property
    def store(self) -> str:
        return self.store_directory or f"{self.directory}/store"

    def to_json(self) -> str:
        values = asdict(self)
        del values["directory"], values["store_directory"]
        return json.dumps({"format": FORMAT, **values}, indent=1)


def trainer_directory(checkpoint: str) -> str:
    return f"{checkpoint}/trainer"
