"""Decides whether a lost member is restarted, or the run returns to its last checkpoint. Pure: time and steps are
arguments, decisions are plain data.

    SERVING ─lost─▶ LOST ─starting─▶ STARTING ─started─▶ CATCHING_UP ─caught_up─▶ SERVING
                     ▲────────────── failed ◀─────────────────┘

    Restart   the usual answer, after a pause that grows while losses go on
    Return    where a new process does not remove the cause: the budget of restarts is spent; restarts fail; or a step
              is lost again by the member that was restarted for it

There is a `Recovery` for each member; `recoveries.py` keeps those of a run, and says when it ends.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from penstock.conf.faults import LONGEST_PAUSE_S, FaultsConfig

FAILED_RESTARTS = 2
"""Failed restarts in a row, for one loss, after which the run returns."""


class MemberState(Enum):
    SERVING = "serving"
    LOST = "lost"
    STARTING = "starting"
    CATCHING_UP = "catching up"


@dataclass(frozen=True)
class Restart:
    """The decision to make a new incarnation of the member."""

    after_s: float


@dataclass(frozen=True)
class Return:
    """The decision to start the whole fleet anew from the last checkpoint."""

    reason: str
    """What happened to the member, in words: lost again at step 7."""


class Recovery:
    """The recovery of one member, over all its incarnations."""

    def __init__(self, config: FaultsConfig) -> None:
        self.state = MemberState.SERVING
        self.lost_at = 0.0
        self._config = config
        self._restarts: deque[float] = deque()
        """Times of the restarts within the window."""
        self._last = float("-inf")
        self._in_row = 0
        """Number of losses and failed restarts in a row, each within a window after the last."""
        self._step: int | None = None
        """The step that the last restart was made for."""
        self._failed = 0

    def lost(self, now: float, step: int | None) -> Restart | Return:
        """Decide after the member died or hangs. `step`: the step lost with a trainer; None for members that hold no
        step."""
        self._check(MemberState.SERVING)
        self.lost_at, self._failed = now, 0
        return self._decided(now, step, f"lost again at step {step}" if step is not None and step == self._step else "")

    def starting(self) -> None:
        self._go(MemberState.LOST, MemberState.STARTING)

    def started(self) -> None:
        self._go(MemberState.STARTING, MemberState.CATCHING_UP)

    def caught_up(self) -> None:
        self._go(MemberState.CATCHING_UP, MemberState.SERVING)

    def failed(self, now: float, step: int | None) -> Restart | Return:
        """Decide after the restart under way has not brought the member back."""
        self._check(MemberState.LOST, MemberState.STARTING, MemberState.CATCHING_UP)
        self._failed += 1
        return self._decided(
            now, step, f"not brought back by {self._failed} restarts" if self._failed >= FAILED_RESTARTS else ""
        )

    def returned(self) -> None:
        """Note that the run has returned to a checkpoint, and makes its steps anew. The budget stays as it is."""
        self.state, self._step = MemberState.SERVING, None

    def _decided(self, now: float, step: int | None, hopeless: str) -> Restart | Return:
        """Count the loss, and decide. `hopeless`: why another restart would not help; empty: it may help."""
        config, self.state = self._config, MemberState.LOST
        self._in_row = self._in_row + 1 if now - self._last < config.window_s else 1
        self._last = now
        while self._restarts and now - self._restarts[0] >= config.window_s:
            self._restarts.popleft()
        if hopeless:
            return Return(hopeless)
        if len(self._restarts) >= config.max_restarts:
            return Return(f"lost after faults.max_restarts={config.max_restarts} restarts in {config.window_s:g} s")
        self._restarts.append(now)
        self._step = step
        return Restart(self._pause_s())

    def _pause_s(self) -> float:
        if self._in_row == 1:
            return 0.0
        doublings = min(self._in_row - 2, 64)
        return min(self._config.pause_s * 2.0**doublings, LONGEST_PAUSE_S)

    def _go(self, before: MemberState, after: MemberState) -> None:
        self._check(before)
        self.state = after

    def _check(self, *states: MemberState) -> None:
        assert self.state in states, f"the member is {self.state.value}, not {' or '.join(s.value for s in states)}"
