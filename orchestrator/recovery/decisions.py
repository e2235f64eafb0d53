"""Decides what is to be done about each fault, and counts what faults cost. Pure: time and steps are arguments, and
decisions are plain data.

    MemberFaults    one member: restart it, or return
    RunFaults       the run: the faults of all members, and when it ends. It outlives fleets
    EffectiveTime   the share of the run's time in which it trained

A member:

    serving ─lost─▶ lost ─ pause, start, catch up ─▶ caught_up: serving
                     ▲────── failed ◀──────┘

    Restart   the usual answer, after a pause that grows while faults continue
    Return    where a new process does not remove the cause: the budget of restarts is spent; restarts fail; or a step
              is lost again by the member that was restarted for it
    EndRun    a return is due, and there were too many

A member is known by its title, which its later incarnations keep.

The effective time:

    effective = 1 - lost seconds / seconds since the run began its first step

A second is lost wholly while the run is behind: from the loss of the trainer, the store or the whole fleet, until it is
where it was before the loss. That is when all steps that had been trained have been trained again, and the next one has
taken as long as it had, or is done. A second in which a of n engines are away, and the run is not behind, is lost to
a/n. What the loss of other members costs shows as waiting, and is not counted.
"""

from collections import Counter, deque
from dataclasses import dataclass

from penstock.conf.faults import LONGEST_PAUSE_S, FaultsConfig

FAILED_RESTARTS = 2
"""Failed restarts in a row, for one loss, after which the run returns."""


@dataclass(frozen=True)
class Restart:
    """The decision to make a new incarnation of the member."""

    after_s: float


@dataclass(frozen=True)
class Return:
    """The decision to start the whole fleet anew from the last checkpoint."""

    reason: str
    """What happened to the member, in words: lost again at step 7."""


class MemberFaults:
    """The faults of one member, over all its incarnations."""

    def __init__(self, config: FaultsConfig) -> None:
        self.is_lost = False
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
        assert not self.is_lost, "the member is lost already"
        self.lost_at, self._failed = now, 0
        return self._decided(now, step, f"lost again at step {step}" if step is not None and step == self._step else "")

    def caught_up(self) -> None:
        """Note that the member serves again."""
        assert self.is_lost, "the member is not lost"
        self.is_lost = False

    def failed(self, now: float, step: int | None) -> Restart | Return:
        """Decide after the restart under way has not brought the member back."""
        assert self.is_lost, "the member is not lost"
        self._failed += 1
        return self._decided(
            now, step, f"not brought back by {self._failed} restarts" if self._failed >= FAILED_RESTARTS else ""
        )

    def returned(self) -> None:
        """Note that the run has returned to a checkpoint, and makes its steps anew. The budget stays as it is."""
        self.is_lost, self._step = False, None

    def _decided(self, now: float, step: int | None, hopeless: str) -> Restart | Return:
        """Count the loss, and decide. `hopeless`: why another restart would not help; empty: it may help."""
        config, self.is_lost = self._config, True
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


@dataclass
class _Place:
    """The point that a run had come to."""

    step: int
    """The step that was trained last."""
    further_s: float
    """Seconds since then."""
    reached: float | None = None
    """Time at which the step was trained again, and all members were there again."""


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


@dataclass(frozen=True)
class EndRun:
    """The decision to end the run, by the error that the member was lost with."""

    reason: str


Decision = Restart | Return | EndRun
SAMPLES = "rollout"
STOPS_ALL = ("trainer", "store")
"""Roles without which no step can be made."""
HOLDS_STEP = "trainer"
"""The role with which a step is lost. If a member of another role dies twice during one step, that tells nothing: steps
are long, and engines many."""


class RunFaults:
    """Lifecycle: `lost` and `failed` say what to do. A `Restart` ends with `caught_up` or `failed`; a `Return` with
    `returned`, or with `return_failed`, which decides again. Losses that are reported while the run returns come of the
    return itself, and change nothing. An `EndRun` is the answer to everything after it.

        book.lost("Rollout-1", "rollout", now=10.0, step=7)    # Restart(after_s=0.0)
    """

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        self.time = EffectiveTime()
        """The effective time; the controller tells it of the steps."""
        self._members: dict[str, MemberFaults] = {}
        self._faults: Counter[str] = Counter()
        self._roles: dict[str, str] = {}
        self._returns: list[tuple[float, int]] = []
        """Time of each return, and the step that it was from."""
        self._return_since: float | None = None
        self._due: Return | None = None
        self._end: EndRun | None = None
        self._lost_s = 0.0
        self._counted: float | None = None
        """Time up to which lost seconds have been counted, while a member is lost."""

    def is_lost(self, title: str) -> bool:
        return title in self._members and self._members[title].is_lost

    def lost(self, title: str, role: str, now: float, step: int) -> Decision | None:
        """Decide about a member that died or hangs while the run was at `step`. None: that is known, or comes of a
        return."""
        if self._is_suspended or self.is_lost(title):
            return self._end
        self._roles[title] = role
        if role in STOPS_ALL:
            self.time.lost(now)
        elif role == SAMPLES:
            self.time.away(title, now)
        member = self._members.setdefault(title, MemberFaults(self._config))
        return self._decided(title, member.lost(now, step if role == HOLDS_STEP else None), now, step)

    def decide_return(self, title: str, role: str, now: float, step: int) -> Return | EndRun:
        """Decide about a loss after which no new process alone can help. An empty role: the run as a whole has
        failed."""
        if self._end is not None:
            return self._end
        if self._due is not None:
            return self._due
        if role:
            self._faults[role] += 1
        return self._return(f"{title} was lost, and nobody can take its place alone", now, step)

    def caught_up(self, title: str, now: float) -> float:
        """Note that a member does its work again. Returns the seconds since it was lost."""
        member = self._members[title]
        if not self._is_suspended:
            member.caught_up()
            self._count(now)
            if self._roles[title] in STOPS_ALL:
                self.time.found(now)
            else:
                self.time.back(title, now)
        return now - member.lost_at

    def failed(self, title: str, now: float, step: int) -> Decision | None:
        """Decide after a restart that has not brought the member back. None: it was cut short by a return."""
        if self._is_suspended:
            return self._end
        held = step if self._roles[title] == HOLDS_STEP else None
        return self._decided(title, self._members[title].failed(now, held), now, step)

    def gone(self, title: str, now: float) -> None:
        """Note that a member has left for good: if it was lost, it is no longer."""
        self._members.pop(title, None)
        self.time.back(title, now)
        if not self._is_suspended:
            self._count(now)

    def returned(self, now: float) -> float:
        """Note that the whole fleet serves again, from the last checkpoint on. Returns the seconds since the
        decision."""
        assert self._return_since is not None, "no return is under way"
        seconds, self._return_since, self._due = now - self._return_since, None, None
        for member in self._members.values():
            member.returned()
        self._count(now)
        return seconds

    def return_failed(self, reason: str, now: float, step: int) -> Return | EndRun:
        """Decide after the fleet did not start from the checkpoint, for `reason`: another return is due, which
        counts."""
        if self._end is not None:
            return self._end
        since, decision = self._return_since, self._return(reason, now, step)
        self._return_since = since
        return decision

    def metrics(self, now: float) -> dict[str, float]:
        """Cumulative metrics: losses and failed restarts by role, the seconds in which any member was lost, and the
        share of the time in which the run trained."""
        self._count(now)
        counts = {f"faults/{role}": float(count) for role, count in sorted(self._faults.items())}
        share = self.time.share(now)
        effective = {} if share is None else {"faults/effective_time": share}
        return counts | {"faults/lost_s": self._lost_s} | effective

    @property
    def _is_suspended(self) -> bool:
        """True while nothing is decided about single members."""
        return self._end is not None or self._return_since is not None

    def _decided(self, title: str, decision: Restart | Return, now: float, step: int) -> Decision:
        self._faults[self._roles[title]] += 1
        self._count(now)
        if isinstance(decision, Restart):
            return decision
        return self._return(f"{title} was {decision.reason}", now, step)

    def _return(self, reason: str, now: float, step: int) -> Return | EndRun:
        if self._num_returns(now, step) >= self._config.max_returns:
            self._end = EndRun(f"{reason}, and faults.max_returns={self._config.max_returns}")
            return self._end
        self._returns.append((now, step))
        self._return_since = now
        self.time.lost(now)
        self._due = Return(reason)
        self._count(now)
        return self._due

    def _num_returns(self, now: float, step: int) -> int:
        """Number of returns that count: recent ones, and those from a step that the run has not got past since."""
        return sum(now - when < self._config.window_s or step <= origin for when, origin in self._returns)

    def _count(self, now: float) -> None:
        """Add up time until now."""
        if self._counted is not None:
            self._lost_s += now - self._counted
        is_lost = self._is_suspended or any(member.is_lost for member in self._members.values())
        self._counted = now if is_lost else None
