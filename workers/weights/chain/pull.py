"""One node's part in one chain: which chunks it has, whom it asks for the others, when it asks somebody else. Pure.

    ask(upstream, missing) ─▶ arrived(chunk)* ─▶ … ─▶ ended      complete, or ask again for what was damaged
                              waiting(age_s)                      the upstream has nothing new, and says so
                              lost | no word until `deadline`     ask the next upstream, for what is missing

What an upstream that waits says beside it is how long ago the trainer's node was heard of, through all that lie
between. So a node whose upstream is alive, but on the wrong side of a cut, knows it too.

Driven by `pulling.py` with sockets and by `benchmarks/simulated_chain.py` with a virtual clock.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.workers.weights.chain.patience import Pace, Patience

MOST_DAMAGED = 8
"""Times that one chunk may arrive damaged. Then it is no accident of a link."""
PAUSE_S, MOST_PAUSE_S = 0.05, 1.0
"""After all upstreams have been asked in vain; twice as long each time, up to the most."""


class Pull:
    """Lifecycle: made when the version begins. Then, until `is_complete` or `failure`: ask `upstream` for `missing`,
    not before `not_before`, and tell what comes, as long as `turn` stays as it was when it was asked."""

    def __init__(
        self,
        chunks: Iterable[int],
        upstreams: Sequence[str],
        chunk_bytes: int,
        pace: Pace,
        patience: Patience,
        now: float,
    ) -> None:
        """`chunks`: numbers of all of the chain. `upstreams`: best first, the last is where the chunks are made.
        `chunk_bytes`: most of a chunk. `pace`: of the chain's earlier versions."""
        self.missing = set(chunks)
        self.turn = 0
        """Changes when the upstream is to be asked anew."""
        self.not_before = now
        self.failure: str | None = None
        """Why it will never be complete."""
        self.reparented = 0
        self._upstreams = list(upstreams)
        self._pace, self._patience, self._chunk_bytes = pace, patience, chunk_bytes
        self._index = 0
        self._damaged: Counter[int] = Counter()
        self._heard = now
        """When anything came last."""
        self._told = now
        """When a whole chunk or message came last."""
        self._source_heard = now
        """When the trainer's node was alive, as far as anybody has told."""
        self._in_vain = 0
        """Upstreams given up since the last chunk came."""

    @property
    def upstream(self) -> str:
        return self._upstreams[self._index]

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def deadline(self) -> float:
        """When silence has lasted too long, or a chunk. Upstreams given up in vain make it longer: where all are slow,
        one of them is to be heard out."""
        patience_s = self._silence_s * 2 ** min(self._in_vain, 6)
        return min(self._heard + patience_s, self._told + self._patience.slow * patience_s)

    def source_age_s(self, now: float) -> float:
        """How long ago the trainer's node was heard of: for those who wait for this node."""
        return now - self._source_heard

    def connected(self, now: float) -> None:
        """The upstream has answered."""
        self._heard = self._told = now

    def progressed(self, now: float) -> None:
        """Some of a chunk has come."""
        self._heard = now

    def arrived(self, chunk: int, num_bytes: int, seconds: float, now: float) -> bool:
        """A chunk with the right digest, so long after its beginning. False: it is there already."""
        self._heard = self._told = self._source_heard = now
        self._in_vain = 0
        self._pace.timed(num_bytes, seconds)
        is_new = chunk in self.missing
        self.missing.discard(chunk)
        return is_new

    def damaged(self, chunk: int, now: float) -> None:
        """A chunk with another digest: it is fetched again when the upstream has sent all else, and if that is damaged
        too, from another one."""
        self._heard = self._told = now
        self._damaged[chunk] += 1
        if self._damaged[chunk] >= MOST_DAMAGED:
            self.failure = f"chunk {chunk} came damaged {MOST_DAMAGED} times, last from {self.upstream}"
        elif self._damaged[chunk] > 1:
            self._take_next(now)

    def waiting(self, source_age_s: float, now: float) -> None:
        """The upstream has nothing new. `source_age_s`: how long ago it has heard of the trainer's node."""
        self._heard = self._told = now
        self._source_heard = max(self._source_heard, now - source_age_s)
        if self.source_age_s(now) > self._patience.cut_off * self._silence_s:
            self._source_heard = now  # the next upstream gets as much time
            self._take_next(now)

    def ended(self, now: float) -> None:
        """The upstream has sent all that it was asked for."""
        if self.missing:
            self._ask_again(now)

    def lost(self, now: float) -> None:
        """The connection has ended, or there was none, or the upstream has given the version up."""
        self._take_next(now)

    def silent(self, now: float) -> None:
        """Nothing has come until `deadline`."""
        self._take_next(now)

    @property
    def _silence_s(self) -> float:
        return self._pace.silence_s(self._chunk_bytes)

    def _take_next(self, now: float) -> None:
        self._index = (self._index + 1) % len(self._upstreams)
        self._in_vain += 1
        self.reparented += 1
        rounds = self._in_vain // len(self._upstreams)
        pause = min(MOST_PAUSE_S, PAUSE_S * 2 ** min(rounds, 8)) if self._index == 0 else 0.0
        self._ask_again(now + pause)

    def _ask_again(self, at: float) -> None:
        self.turn += 1
        self._heard = self._told = self.not_before = at
