"""The share of a run's time in which it trained, taking faults into account. Pure: time is an argument.

    effective = 1 - lost seconds / seconds since the run began its first step

A second is lost wholly while the run is behind: from the loss of the trainer, the store or the whole fleet, until it is
where it was before the loss. That is when all steps that had been trained have been trained again, and the next one has
gone on for as long as it had, or is done. A second in which a of n engines are away, and the run is not behind, is lost
to a/n. What the loss of others costs shows as waiting, and is not counted.
"""

from dataclasses import dataclass


@dataclass
class _Place:
    """The point that a run had come to."""

    step: int
    """The step that was trained last."""
    further_s: float
    """Seconds since then."""
    reached: float | None = None
    """Time at which the step was trained again, and the members to go on with it were there."""


class EffectiveTime:
    """Lifecycle: `begin` with the first step, and again after each return; `trained` after each; losses in between.

    time = EffectiveTime()
    time.begin(0, num_engines=4, now=0.0)
    time.trained(1, tokens=1000, now=10.0)
    time.away("Rollout-0", now=12.0)
    time.back("Rollout-0", now=20.0)     # 8 s of a quarter of the engines: 2 s
    time.share(now=20.0)                 # 0.9
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._counted = 0.0
        """Time up to which lost seconds have been counted."""
        self._lost_s = 0.0
        self._num_engines = 1
        self._away: set[str] = set()
        self._step = 0
        self._step_began = 0.0
        self._behind: _Place | None = None
        self._is_down = False
        """True while no steps are taken."""
        self._tokens: dict[int, int] = {}
        """Response tokens that were trained, by step."""

    def begin(self, step: int, num_engines: int, now: float) -> None:
        """Note that steps are taken, from the one after `step` on."""
        self._elapse(now)
        if self._began is None:
            self._began = self._counted = now
        self._step, self._num_engines = step, max(1, num_engines)
        self._away.clear()
        self._tokens = {trained: tokens for trained, tokens in self._tokens.items() if trained <= step}
        self._goes_on(now)

    def trained_after(self, step: int) -> tuple[int, int]:
        """Steps that are trained again by a run that returns to `step`, and their response tokens."""
        again = [tokens for trained, tokens in self._tokens.items() if trained > step]
        return len(again), sum(again)

    def trained(self, step: int, tokens: int, now: float, num_serving: int | None = None) -> None:
        """Note that a step is trained, with its number of response tokens. `num_serving`: engines that are there, which
        come and go; None: as many as before."""
        self._elapse(now)
        if num_serving is not None:
            self._num_engines = max(1, num_serving + len(self._away))
        self._step, self._step_began = step, now
        self._tokens[step] = tokens
        if self._behind is not None and step > self._behind.step:
            self._behind = None
        elif self._behind is not None and step == self._behind.step:
            self._behind.reached = now

    def lost(self, now: float) -> None:
        """Note that the trainer, the store or the whole fleet is gone. What is lost on the way back changes nothing."""
        if self._began is None or self._is_down:
            return
        self._elapse(now)
        self._is_down = True
        place = _Place(self._step, now - self._step_began)
        if self._behind is None or (place.step, place.further_s) > (self._behind.step, self._behind.further_s):
            self._behind = place
        self._behind.reached = None

    def found(self, now: float) -> None:
        """Note that what was lost is there again, as after the step that was trained last."""
        if self._began is not None:
            self._elapse(now)
            self._goes_on(now)

    def away(self, engine: str, now: float) -> None:
        self._elapse(now)
        self._away.add(engine)

    def back(self, engine: str, now: float) -> None:
        self._elapse(now)
        self._away.discard(engine)

    def lost_s(self, now: float) -> float:
        self._elapse(now)
        return self._lost_s

    def share(self, now: float) -> float | None:
        """The effective share of the time so far; None before the first step."""
        lost_s = self.lost_s(now)
        if self._began is None or now <= self._began:
            return None
        return 1.0 - lost_s / (now - self._began)

    def _goes_on(self, now: float) -> None:
        self._step_began, self._is_down = now, False
        if self._behind is not None and self._step >= self._behind.step:
            self._behind.reached = now

    def _elapse(self, now: float) -> None:
        """Count until now."""
        if self._began is None or now <= self._counted:
            return
        since, self._counted = self._counted, now
        behind = self._behind
        if behind is not None:
            until = now if behind.reached is None else min(now, max(since, behind.reached + behind.further_s))
            self._lost_s += until - since
            since = until
            if until < now:
                self._behind = None
        self._lost_s += (now - since) * min(1.0, len(self._away) / self._num_engines)
