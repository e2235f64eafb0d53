"""Requests of people for more or fewer members of a role: what a request means for the present members, why it cannot
be granted, its result as text; and `penstock scale`, which brings one to a run's controller from another process.

    rollout=+2   two more       rollout=3   three in all       reward=-1   one less, of each reward stage

    penstock scale RUN rollout=+2 ─▶ RUN/cluster.json ─▶ mailbox of the agent on the driver's node ─▶ `scaling.py`

A request is granted whether or not the asking process waits for the answer. Light: Ray is imported once its
environment is set.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.conf.errors import CannotScale, ResourceError, suggest
from penstock.conf.rollout import RolloutConfig
from penstock.orchestrator.cluster.ray_connection import at_run
from penstock.orchestrator.run_directory.fetching import open_at
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_lock import ENDS, last_start_or_end

ROLES = ("rollout", "reward")
"""Roles that may have more members, and fewer."""
MET_AT_START = (
    "engines and the trainer's ranks met at the start, as they share devices (placement=colocated) or stream weights "
    "(weights.transport). Start with another rollout.num_workers."
)
"""Reason why there can be no more of a role, and no fewer."""
OWN_OF_EVALUATION = (
    "some engines are of evaluations alone (evaluation.num_workers). Start without them, or with another "
    "rollout.num_workers."
)
"""Reason why there can be no more engines, and no fewer, where evaluations have some of their own."""
PATTERN = re.compile(r"(?P<role>[a-z]+)=(?P<sign>[+-]?)(?P<number>\d+)")
START_KEYS = ("start_timeout_s", "enforce_eager", "compile_timeout_s")
"""Keys by which `RolloutConfig.engine_start_s` follows."""
PATIENCE_S = 60.0
"""Seconds to wait for the answer beyond what starting and draining may take."""


@dataclass(frozen=True)
class ScalingRequest:
    """A request for `number` members in all, or for so many more than there are."""

    role: str
    number: int
    is_change: bool = False

    @classmethod
    def of(cls, text: str) -> "ScalingRequest":
        """Parse a request as it is typed. Raises `CannotScale`."""
        found = PATTERN.fullmatch(text)
        if found is None:
            raise CannotScale(f"{text}: no request. Write rollout=+2 for two more, rollout=-1 for one less, rollout=3.")
        role, sign, number = found["role"], found["sign"], int(found["number"])
        if role not in ROLES:
            raise CannotScale(f"{text}: no role that may change during a run{suggest(role, ROLES)}")
        return cls(role, -number if sign == "-" else number, bool(sign))

    def __str__(self) -> str:
        return f"{self.role}={self.number:{'+' if self.is_change else ''}d}"


def change_of(request: ScalingRequest, num_present: int, refusals: Mapping[str, str]) -> int:
    """Number of members to add, negative to remove. `refusals`: reasons for roles that cannot change. Raises
    `CannotScale`."""
    if request.role in refusals:
        raise CannotScale(f"{request}: {refusals[request.role]}")
    change = request.number if request.is_change else request.number - num_present
    if num_present + change < 1:
        raise CannotScale(f"{request}: {num_present} there now, and one has to stay. To end the run, interrupt it.")
    return change


def who_leaves(names: Sequence[str], count: int) -> list[str]:
    """The last members that came: what the first ones reserve stays the run's. `names`: in the order in which they
    came."""
    return list(reversed(names[len(names) - count :]))


@dataclass
class ScalingResult:
    """The result of a request."""

    role: str
    before: int
    after: int = 0
    joined: list[str] = field(default_factory=list)
    """Members that joined, with their nodes: `Rollout-1 on node-2`."""
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Reasons why not all that was asked for was done."""

    def __str__(self) -> str:
        """The result as text.

        >>> str(ScalingResult("rollout", 1, 3, ["Rollout-1 on node-2", "Rollout-2 on node-1"]))
        'rollout: 1 -> 3 (Rollout-1 on node-2, Rollout-2 on node-1)'
        """
        moved = [*self.joined, *(f"{name} has left" for name in self.left)]
        return f"{self.role}: {self.before} -> {self.after}" + (f" ({', '.join(moved)})" if moved else "")


def ask(run: str, texts: Sequence[str], drain_s: float | None = None) -> tuple[list[str], list[str]]:
    """Ask a run for a change. Returns what was done, one line a role, and what was not. `run`: its directory or URL.
    Raises `CannotScale` for what cannot be, `ConfigError` if `run` is no run, `ResourceError` if it does not answer,
    `CheckpointError` for a URL that does not."""
    for text in texts:
        ScalingRequest.of(text)
    with open_at(run) as directory:
        answer = _answer(directory, texts, drain_s)
    if answer is None:
        raise CannotScale(f"{directory.path.name}: the run ended before it could be done.")
    if answer["refused"]:
        raise CannotScale(answer["refused"])
    return answer["done"], answer["problems"]


def longest_answer_s(rollout: Mapping[str, Any], drain_s: float | None) -> float:
    """Longest wait in seconds for the answer of a run. `rollout`: that section of its configuration, as it is recorded.
    `drain_s`: the caller's; None: the run's own."""
    start = RolloutConfig(**{key: rollout[key] for key in START_KEYS if key in rollout})
    return PATIENCE_S + 2 * start.engine_start_s + (rollout["drain_s"] if drain_s is None else drain_s)


def _answer(directory: RunDirectory, texts: Sequence[str], drain_s: float | None) -> Any:
    """The controller's answer; None if the run ends meanwhile."""
    last = last_start_or_end(directory.read_events())
    if last.get("kind") in ENDS:
        raise CannotScale(f"{directory.path.name}: the run is over ({last['kind']} at {last['time']}).")
    if not directory.cluster_file.is_file():
        raise CannotScale(f"{directory.path.name}: it has not started its actors yet. Ask again in a moment.")
    longest_s = longest_answer_s(directory.read_config()["rollout"], drain_s)
    with at_run(directory, "the controller") as found:
        import ray  # late: it reads its environment when it is imported

        agent = ray.get_actor(f"Agent-{found['host']}", namespace=found["namespace"])
        try:
            return ray.get(agent.ask.remote((list(texts), drain_s)), timeout=longest_s)
        except ray.exceptions.GetTimeoutError:
            raise ResourceError(
                f"{directory.path.name}: no answer within {longest_s:g} s. The run still works on it: see `joined` "
                f"and `left` in {directory.place}/events.jsonl."
            ) from None
