"""One task of an environment: what a group's attempts are all at."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """The same for all attempts of a group."""

    id: str
    seed: int
    """Of what is random in the environment; the policy's sampling has its own."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON: what the environment needs to know, or the row of a dataset."""

    def to_json(self) -> str:
        """The `task` column."""
        return json.dumps({"id": self.id, "seed": self.seed, "data": dict(self.data)}, default=str)

    @classmethod
    def from_json(cls, text: str) -> "Task":
        value = json.loads(text)
        if "data" not in value:  # a row of a dataset
            return cls(str(value.get("index", "")), int(value.get("index") or 0), value)
        return cls(str(value["id"]), int(value["seed"]), value["data"])
