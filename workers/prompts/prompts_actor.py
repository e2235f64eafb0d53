"""`Prompts`: the Ray shell around the dataset; it admits groups to the store as the store has credits for them."""

import asyncio
from functools import partial

from penstock.conf.run import RunConfig
from penstock.store.client.store_client import StoreClient
from penstock.workers.prompts.data_identity import DataIdentity
from penstock.workers.prompts.opening import open_source
from penstock.workers.prompts.source import PromptSource, PromptStart
from penstock.workers.runtime.serving import Progress, ServingActor


class Prompts(ServingActor):
    """Lifecycle: that of every `ServingActor`."""

    def __init__(
        self,
        config: RunConfig,
        model_path: str,
        rows_are: str,
        start: PromptStart | None = None,
        picture_digest: str | None = None,
        needs_answer: bool = False,
    ) -> None:
        """`rows_are`: "prompts", "tasks", "demonstrations" or "preferences" (`Dataflow.rows_are`). `model_path`: where
        the tokenizer is. `start`: the place where a resumed run continues. `picture_digest`: of the processor of the
        run's pictures. `needs_answer`: the reward needs each prompt's answer."""
        super().__init__("Prompts")
        self._groups_per_step = config.trainer.groups_per_step
        self._open = partial(
            open_source, config, model_path, rows_are=rows_are, start=start, picture_digest=picture_digest,
            needs_answer=needs_answer,
        )  # fmt: skip
        self._source: PromptSource | None = None

    async def start(self) -> None:
        self._source = self._open()
        await super().start()

    async def _serve(self, store: StoreClient) -> None:
        assert self._source is not None
        await self._source.run(store, self._groups_per_step)

    async def start_after(self, num_groups: int) -> PromptStart:
        """The place where a run continues whose store has had so many groups (`StoreClient.cut`)."""
        assert self._source is not None
        return self._source.start_after(num_groups)

    async def identity(self) -> DataIdentity:
        """Return the identity of the rows."""
        source = self._source
        assert source is not None
        return await asyncio.to_thread(lambda: source.identity)

    async def progress(self) -> Progress:
        """Number of groups drawn. May be called at any time."""
        return self._phases.progress(self._source.num_drawn if self._source is not None else 0)

    async def stats(self) -> dict[str, float]:
        """Groups drawn and rows left out (`dropped/prompt_too_long`), since the start."""
        return self._source.stats() if self._source is not None else {}
