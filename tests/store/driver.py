"""A small GRPO-shaped store, and a driver that plays its workers one event at a time."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock.algorithms.graph.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, STANDARD_COLUMNS
from penstock.store.ledger.group import Facts, Group
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.ledger import Ledger
from penstock.store.spec import StageSpec, StoreSpec
from tests.store.checked_ledger import CheckedLedger
from tests.store.invariants import check_invariants

STAGES = (
    StageSpec("rollout", "group", ("prompt_ids",), ROLLOUT_COLUMNS),
    StageSpec("reward", "sample", ("task", "response_text"), ("reward",)),
    StageSpec("reference", "sample", ("prompt_ids", "response_ids"), ("reference_logprobs",)),
    StageSpec("group_advantage", "group", ("reward",), ("advantage",)),
    StageSpec(
        "train",
        "batch",
        (
            "prompt_ids",
            "response_ids",
            "behavior_logprobs",
            "token_versions",
            "reward",
            "advantage",
            "reference_logprobs",
        ),
        (),
    ),
)


def make_spec(**changes: Any) -> StoreSpec:
    spec = StoreSpec(
        columns=tuple(STANDARD_COLUMNS.values()),
        source_columns=PROMPT_COLUMNS,
        stages=STAGES,
        group_size=2,
        groups_per_step=2,
        max_active_groups=4,
        max_staleness=1,
        lease_timeout_s=10.0,
    )
    return replace(spec, **changes)


def facts_for(stage: str, num_rows: int, version: int = 0, tokens: int = 3, nbytes: int = 8) -> Facts:
    if stage == "rollout":
        return Facts(
            [nbytes] * num_rows, [version] * num_rows, [tokens] * num_rows, None, "response_ids", [tokens] * num_rows
        )
    return Facts([nbytes] * num_rows)


def facts_of(columns: Iterable[str], num_rows: int, version: int = 0, tokens: int = 3, nbytes: int = 8) -> Facts:
    """What `encode` would say of a write of these columns."""
    token_columns = [name for name in columns if STANDARD_COLUMNS[name].shape == "token"]
    lengths = [tokens] * num_rows
    return Facts(
        [nbytes] * num_rows,
        [version] * num_rows if "token_versions" in token_columns else None,
        lengths if "response_ids" in token_columns else None,
        None,
        token_columns[0] if token_columns else "",
        lengths if token_columns else None,
    )


class Driver:
    """Plays the workers of a ledger; checks its effects and its invariants after each event."""

    def __init__(self, spec: StoreSpec) -> None:
        self.ledger = CheckedLedger(spec)
        self.writes = {stage.name: stage.writes for stage in spec.stages}

    def admit(self, count: int = 1, now: float = 0.0) -> list[int | None]:
        return [self.ledger.admit(now, nbytes=16, prompt_tokens=2) for _ in range(count)]

    def lease(self, stage: str, max_units: int = 1, now: float = 0.0, owner: str = "worker") -> HeldLease | None:
        lease = self.ledger.lease(stage, max_units, owner, now)
        check_invariants(self.ledger)
        return lease

    def write(self, lease: HeldLease, stage: str, rows: list[int], version: int = 0, now: float = 0.0) -> list[int]:
        kept = self.ledger.write(lease.id, stage, rows, self.writes[stage], facts_for(stage, len(rows), version), now)
        check_invariants(self.ledger)
        return kept

    def compute(self, stage: str, max_units: int = 100, version: int = 0, now: float = 0.0) -> list[int]:
        """Lease and finish what is free in a stage; the rows."""
        lease = self.lease(stage, max_units, now)
        if lease is None:
            return []
        rows = self.ledger.rows_of(lease)
        self.write(lease, stage, rows, version, now)
        return rows

    def compute_all(self, version: int = 0) -> None:
        """Everything that is free, up to the train stage."""
        for stage in ("rollout", "reward", "reference", "group_advantage"):
            while self.compute(stage, version=version):
                pass

    def train(self, number: int, publish: bool = True) -> list[int] | None:
        """One update by one rank; the rows trained."""
        made = self.ledger.lease_shared("train", number, 1, 1, "trainer", 0.0)
        check_invariants(self.ledger)
        if made is None:
            return None
        rows = self.ledger.rows_of_rank(made, 0)
        self.ledger.complete_shared(made.lease_id, 0)
        check_invariants(self.ledger)
        if publish:
            self.ledger.served(made.version + 1)
            check_invariants(self.ledger)
        return rows


def living_groups(ledger: Ledger) -> list[Group]:
    """Those with rows that are neither trained nor dropped, by number."""
    return [group for _, group in sorted(ledger.residents.groups.items()) if group.live]
