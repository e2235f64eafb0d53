"""Rules of alerts for Prometheus over all runs.

A rule compares what a query says with a bound. What is low because a process has ended is no alert. Its counters stay,
and its gauges do not, so rules about what is low ask for a gauge as well.
"""

from dataclasses import dataclass
from typing import Any

from penstock.metering import table
from penstock.orchestrator.observability.grafana.promql import WAITING, over

GROUP = "penstock"
LATELY = over("10m")
RUN, ACTOR = ("run",), ("run", "actor")
NOT_OF_THE_TASK = 'reason!="no_signal"'
"""Condition on rows that an algorithm did not drop on purpose, as it does with groups without a signal."""
THERE = LATELY.value(table.ROLLOUT_RUNNING, ACTOR)
GOES_ON = f"and on (run) {LATELY.value(table.STORE_SEEN, RUN)}"


@dataclass(frozen=True)
class Rule:
    name: str
    query: str
    comparison: str
    """The comparison with its bound, such as `> 0.9`."""
    holds: str
    """Time for which the rule has to hold before the alert is sent."""
    severity: str
    summary: str
    """A sentence with Prometheus' templates."""
    advice: str

    @property
    def expr(self) -> str:
        return f"({self.query}) {self.comparison}"

    def as_yaml(self) -> dict[str, Any]:
        return {
            "alert": self.name, "expr": self.expr, "for": self.holds, "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.advice},
        }  # fmt: skip


def _errors_share() -> str:
    errors, samples = LATELY.rate(table.REWARD_ERRORS, RUN), LATELY.rate(table.REWARD_SAMPLES, RUN)
    return f"{errors} / ({errors} + {samples})"


RULES = (
    Rule(
        "PenstockTrainerStarved",
        f"avg by (run) ({LATELY.sum_rate(table.TRAINER_PHASES, ACTOR, WAITING)}) {GOES_ON}",
        "> 0.9", "15m", "warning", "Ranks of {{ $labels.run }} wait {{ $value | humanizePercentage }} of the time",
        "They wait for batches. More engines (penstock scale RUN rollout=+1), or max_staleness=1 where it is 0.",
    ),
    Rule(
        "PenstockEngineIdle",
        f"1 - ({LATELY.rate(table.ROLLOUT_BUSY, ACTOR)} and on (run, actor) {THERE})",
        "> 0.9", "15m", "warning",
        "{{ $labels.actor }} of {{ $labels.run }} is idle {{ $value | humanizePercentage }} of the time",
        "Fewer engines would do, or max_staleness is too small for engines and ranks to overlap.",
    ),
    Rule(
        "PenstockMembersLost",
        over("15m").growth(table.RUN_LOST, ("run", "member_role")),
        "> 0", "0m", "warning", "{{ $labels.run }} has lost a {{ $labels.member_role }}",
        "Others take its place. Events and stacks/ of the run's directory say why it was lost.",
    ),
    Rule(
        "PenstockRowsDropped",
        f"{LATELY.rate(table.STORE_DROPPED, ('run', 'reason'), NOT_OF_THE_TASK)} "
        f"/ on (run) group_left () {LATELY.rate(table.STORE_ADMITTED, RUN)}",
        "> 0.3", "10m", "warning",
        "{{ $labels.run }} drops {{ $value | humanizePercentage }} of its rows: {{ $labels.reason }}",
        "`penstock status RUN` says what workers said of the last of them.",
    ),
    Rule(
        "PenstockRewardErrors",
        _errors_share(),
        "> 0.1", "10m", "warning", "{{ $value | humanizePercentage }} of the rewards of {{ $labels.run }} fail",
        "`penstock status RUN` says how. Samples without a reward are not trained.",
    ),
    Rule(
        "PenstockNoStep",
        f"time() - {LATELY.value(table.TRAINER_LAST_STEP, RUN)}",
        "> 1800", "0m", "critical", "{{ $labels.run }} has made no step for {{ $value | humanizeDuration }}",
        "`penstock status RUN` says who waits for what. Raise the bound where steps take that long.",
    ),
    Rule(
        "PenstockKvCacheFull",
        LATELY.average(table.ROLLOUT_KV_CACHE, ACTOR),
        "> 0.95", "10m", "warning", "The KV cache of {{ $labels.actor }} of {{ $labels.run }} is full",
        "Sequences wait or are computed again. Raise rollout.kv_cache_gib or rollout.gpu_memory_utilization, or lower "
        "rollout.max_concurrent_samples.",
    ),
    Rule(
        "PenstockMismatch",
        LATELY.value(table.TRAINER_MISMATCH, RUN),
        "> 0.1", "10m", "warning", "Trainer and engines of {{ $labels.run }} differ by {{ $value }} nats a token",
        "They do not compute the same policy. Compare rollout.dtype with the trainer's.",
    ),
    Rule(
        "PenstockStoreNearlyFull",
        f"{LATELY.value(table.STORE_BYTES, RUN)} / {LATELY.value(table.STORE_CAPACITY, RUN)}",
        "> 0.9", "5m", "warning", "The store of {{ $labels.run }} is {{ $value | humanizePercentage }} full",
        "New prompts wait for room. Raise store.max_bytes, or find the stage whose rows pile up: penstock status RUN.",
    ),
)  # fmt: skip


def rules_file() -> dict[str, Any]:
    return {"groups": [{"name": GROUP, "rules": [rule.as_yaml() for rule in RULES]}]}
