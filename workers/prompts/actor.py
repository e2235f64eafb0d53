"""`Prompts`: the Ray shell around the dataset; it admits groups to the store as the store has credits for them."""

from dataclasses import dataclass
from typing import Any

from penstock.conf.data import DataConfig, EvaluationConfig
from penstock.store.client import StoreClient
from penstock.workers.prompts.source import PromptSource, open_source


@dataclass(frozen=True)
class PromptsSpec:
    data: DataConfig
    evaluation: EvaluationConfig
    model_path: str
    """Where the tokenizer is."""
    demonstrations: bool
    """Rows bring their response (supervised training)."""
    groups_per_step: int
    max_sequence_tokens: int


class Prompts:
    """Lifecycle: `start`, then `run` until the store closes."""

    def __init__(self, spec: PromptsSpec, store: Any) -> None:
        self._spec = spec
        self._client = StoreClient(store)
        self._source: PromptSource | None = None

    async def start(self) -> None:
        spec = self._spec
        self._source = open_source(
            spec.data,
            spec.evaluation,
            spec.model_path,
            demonstrations=spec.demonstrations,
            max_sequence_tokens=spec.max_sequence_tokens,
        )

    async def run(self) -> None:
        assert self._source is not None
        await self._source.run(self._client, self._spec.groups_per_step)

    async def stats(self) -> dict[str, float]:
        return self._source.stats() if self._source is not None else {}

    async def close(self) -> None:
        """Nothing to end; the same call as for every other actor."""
