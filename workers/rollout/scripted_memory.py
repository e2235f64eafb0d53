"""The KV memory of a scripted engine, and its scheduler: what an engine does whose memory is too small for all that it
is asked for, in simulated time.

    request ─▶ waiting, by priority ─▶ its blocks, those of a cached prefix for nothing ─▶ running: 16 tokens a round
                    ▲                                                                          │ no block is free
                    └──────────────────────────── preempted: the youngest ◀────────────────────┘

As in vLLM a block is known by all tokens up to its end, blocks of ended requests stay until others need them (the one
that was used longest ago goes first), and a preempted request is read again from its beginning.
"""

import asyncio
import hashlib
import heapq
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.workers.protocols import KvLoad

Block = bytes
"""Hash of all tokens up to the block's end."""


@dataclass(frozen=True)
class MemoryModel:
    """The size of the memory, and the durations of the work. By default about those of a model of 7B parameters on a
    large GPU."""

    num_tokens: int
    """Tokens that fit."""
    max_model_len: int
    """Largest length of a sequence, in tokens."""
    max_samples: int = 256
    """Largest number of samples that are decoded at once."""
    step_s: float = 0.01
    """Seconds of a decode step, however few samples it has."""
    sample_s: float = 0.0001
    """Further seconds of a step, for each of its samples."""
    read_s: float = 0.00005
    """Seconds to read a token of a prompt that is not cached."""
    block_tokens: int = 16
    """Tokens of a block, and decode steps of a round."""


class BlockCache:
    """Blocks in use, and those that are kept for the next one that asks for them."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._in_use: dict[Block, int] = {}
        """Blocks with the number of their users."""
        self._idle: dict[Block, None] = {}
        """Blocks without users, the one that was used longest ago first."""

    @property
    def usage(self) -> float:
        return len(self._in_use) / self._num_blocks

    def num_cached(self, blocks: Sequence[Block]) -> int:
        """Number of the first blocks that are here."""
        missing = (place for place, block in enumerate(blocks) if block not in self._in_use and block not in self._idle)
        return next(missing, len(blocks))

    def take(self, blocks: Sequence[Block]) -> bool:
        """Use these blocks, if there is room for all of them."""
        if len(self._in_use) + sum(block not in self._in_use for block in blocks) > self._num_blocks:
            return False
        for block in blocks:
            self._idle.pop(block, None)
            self._in_use[block] = self._in_use.get(block, 0) + 1
        while len(self._in_use) + len(self._idle) > self._num_blocks:
            del self._idle[next(iter(self._idle))]
        return True

    def give_back(self, blocks: Sequence[Block]) -> None:
        """Use these no longer. The ends of sequences are evicted before their beginnings."""
        for block in reversed(blocks):
            self._in_use[block] -= 1
            if not self._in_use[block]:
                del self._in_use[block]
                self._idle[block] = None

    def forget(self) -> None:
        """Drop what no request uses, as new weights do."""
        self._idle.clear()


@dataclass(eq=False)
class SimulatedRequest:
    """A sample under way."""

    priority: int
    order: int
    """Position among the requests, in the order of their arrival."""
    blocks: Sequence[Block]
    """All blocks that it will have."""
    num_prompt: int
    num_tokens: int
    """Number of all tokens that it will have, those of the prompt included."""
    versions: list[int] = field(default_factory=list)
    """Versions of the tokens sampled so far."""
    num_held: int = 0
    """Number of blocks that it has."""
    num_cached: int | None = None
    """Tokens of the prompt that were cached when it was first read."""
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def position(self) -> int:
        """Number of tokens so far."""
        return self.num_prompt + len(self.versions)

    def __lt__(self, other: "SimulatedRequest") -> bool:
        return (self.priority, self.order) < (other.priority, other.order)


class MemoryScheduler:
    """Lifecycle: `answer` any number of times, concurrently; it works while there is something to answer."""

    def __init__(self, model: MemoryModel, version: Callable[[], int]) -> None:
        """`version`: of the weights that are served now."""
        self._model, self._version = model, version
        self.cache = BlockCache(model.num_tokens // model.block_tokens)
        self._running: list[SimulatedRequest] = []
        self._waiting: list[SimulatedRequest] = []
        self._num_requests = self.num_preempted = 0
        self._num_steps = 0.0
        self._work: asyncio.Task[None] | None = None

    async def answer(self, prompt_ids: Sequence[int], token_ids: Sequence[int], priority: int) -> SimulatedRequest:
        """Sample these tokens. A request that is cancelled frees its blocks."""
        ids = [*prompt_ids, *token_ids]
        self._num_requests += 1
        blocks = list(_blocks(ids, self._model.block_tokens))
        request = SimulatedRequest(priority, self._num_requests, blocks, len(prompt_ids), len(ids))
        heapq.heappush(self._waiting, request)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._answer_all())
        try:
            await request.done
        finally:
            self._remove(request)
        return request

    def load(self) -> KvLoad:
        model = self._model
        return KvLoad(
            model.num_tokens, model.max_model_len, self.cache.usage, len(self._running), self._num_steps,
            self.num_preempted,
        )  # fmt: skip

    async def _answer_all(self) -> None:
        while self._running or self._waiting:
            decoding = self._grow()
            num_read = self._admit() if len(decoding) == len(self._running) and not self._has_preempted else 0
            steps = max((self._num_new(request) for request in decoding), default=0)
            model = self._model
            await asyncio.sleep(num_read * model.read_s + steps * (model.step_s + len(decoding) * model.sample_s))
            self._num_steps += sum(map(self._num_new, decoding)) / max(1, len(decoding))
            for request in decoding:
                if request in self._running:
                    request.versions += [self._version()] * self._num_new(request)
                    if request.position == request.num_tokens:
                        self._remove(request)
                        if not request.done.done():
                            request.done.set_result(None)

    def _num_new(self, request: SimulatedRequest) -> int:
        """Tokens of a request in the next round."""
        return min(self._model.block_tokens, request.num_tokens - request.position)

    def _grow(self) -> list[SimulatedRequest]:
        """Give each running request the blocks of its next tokens, and preempt the youngest while there are none.
        Returns those that go on."""
        self._has_preempted = False
        for request in sorted(self._running):
            while request in self._running:
                end = math.ceil((request.position + self._num_new(request)) / self._model.block_tokens)
                if self.cache.take(request.blocks[request.num_held : end]):
                    request.num_held = end
                    break
                youngest = max(self._running)
                self._remove(youngest)
                heapq.heappush(self._waiting, youngest)
                self.num_preempted += 1
                self._has_preempted = True
        return list(self._running)

    def _admit(self) -> int:
        """Admit waiting requests while there is room for what they have read. Returns the tokens to be read."""
        num_read = 0
        while self._waiting and len(self._running) < self._model.max_samples:
            request = self._waiting[0]
            size = self._model.block_tokens
            read = request.blocks[: math.ceil(request.position / size)]
            num_cached = min(self.cache.num_cached(read) * size, request.position - 1)
            if not self.cache.take(read):
                break
            if request.num_cached is None:
                request.num_cached = num_cached
            request.num_held = len(read)
            num_read += request.position - num_cached
            self._running.append(heapq.heappop(self._waiting))
        return num_read

    def _remove(self, request: SimulatedRequest) -> None:
        """Take a request out of what is under way, if it is there."""
        if request in self._running:
            self._running.remove(request)
            self.cache.give_back(request.blocks[: request.num_held])
            request.num_held = 0
        elif request in self._waiting:
            self._waiting.remove(request)
            heapq.heapify(self._waiting)


def _blocks(ids: Sequence[int], size: int) -> Iterator[Block]:
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(ids), size):
        digest.update(array("i", ids[start : start + size]).tobytes())
        yield digest.digest()
