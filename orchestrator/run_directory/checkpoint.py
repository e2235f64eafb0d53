"""A checkpoint of a run: what its manifest says, and where it is.

`checkpointing/` writes, finds and opens them; `fleet/` starts actors from one.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.conf.secret import hide_in
from penstock.workers.prompts.source import PromptStart
from penstock.workers.runtime.url_files import SavedFile

FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: what its manifest says, and where it is."""

    directory: str
    step: int
    """The last step that was taken; also the policy version."""
    prompts: PromptStart
    model_path: str
    """The model that configuration, tokenizer and the weights that were not trained come from."""
    model_paths: dict[str, str]
    files: list[SavedFile] = field(default_factory=list)
    """The files of `trainer/`."""
    config: dict[str, Any] = field(default_factory=dict)
    """The run's configuration, resolved."""
    head: str = "policy"
    """The kind of model: policy or scores."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the last update, as far as known: its line of metrics.jsonl, should the run die before it is
    written."""
    store_directory: str = ""
    """The local directory that `store/` was fetched to from a URL."""

    @property
    def trainer(self) -> str:
        return trainer_directory(self.directory)

    @property
    def store(self) -> str:
        return self.store_directory or f"{self.directory}/store"

    def to_json(self) -> str:
        values = asdict(self)
        del values["directory"], values["store_directory"]
        return hide_in(json.dumps({"format": FORMAT, **values}, indent=1))


def trainer_directory(checkpoint: str) -> str:
    return f"{checkpoint}/trainer"
