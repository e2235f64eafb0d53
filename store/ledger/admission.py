"""Backpressure: which producer may put another group, by credits (groups) and by bytes.

P: groups of a step. w: the window (`store.window`). S: staleness that is left for admission when the window has had its
part, `max_staleness - ceil((w - 1) / P)`, and rows that are trained again theirs (`conf/run.py`).

A group is *active* from its admission until `served(v)`, by which every engine serves v, covers the step that
trained it, or until drops end it. With at most `(S + 1) P` of them, a group admitted while version v is served has
fewer than `(S + 1) P` active ones before it, so the step that makes version `v + S + 1` trains it at the latest, and
its tokens are of version v or newer: staleness at most S. A window w lets at most w - 1 later groups overtake it, which
adds at most `ceil((w - 1) / P)`.

This requires that a version is reported as served only once every engine that leases samples under it. An engine that
is lent (`orchestrator/control/loans.py`) keeps an older version u, and has leased for the last time before any version
after u is reported. So the groups that it still holds were admitted while u or an older version was served, and its
tokens, of version u, are as new as the proof asks for. It leases again once it has loaded the newest version.
"""

from collections.abc import Iterable

from penstock.store.errors import TooLarge


def check_group_bytes(max_bytes: int, group_bytes: Iterable[int]) -> None:
    """Raise `TooLarge` if a group can never be admitted. `max_bytes`: the spec's."""
    largest = max(group_bytes, default=0)
    if largest > max_bytes:
        raise TooLarge(f"a group of {largest} bytes exceeds store.max_bytes={max_bytes}. Raise store.max_bytes.")


class Credits:
    """The counts of active groups and resident bytes. Bytes never block the groups that the next batch needs: no
    deadlock."""

    def __init__(self, max_active: int, groups_per_step: int, max_bytes: int) -> None:
        self.most_active = self.max_active = max_active
        self.groups_per_step = groups_per_step
        self.max_bytes = max_bytes
        self.active = 0
        self.bytes = 0
        self.served_version = 0
        """Newest version of the policy that every engine serves."""
        self.due: dict[int, int] = {}
        """Number of groups whose credits return when every engine serves a version, by version."""

    def refusal(self, nbytes: int, num_waiting: int) -> str | None:
        """The reason why a group of `nbytes` must wait ("credits" or "bytes"), or None. `num_waiting`: groups in no
        batch yet."""
        if self.active >= self.max_active:
            return "credits"
        if self.bytes + nbytes > self.max_bytes and num_waiting >= self.groups_per_step:
            return "bytes"
        return None

    def admit(self) -> None:
        self.active += 1

    def ended(self) -> None:
        """Note that an active group ended without being trained."""
        self.active -= 1

    def trained(self, version: int, num_groups: int) -> None:
        """Note that `num_groups` were trained by the step that makes `version`."""
        if version <= self.served_version:
            self.active -= num_groups
        elif num_groups:
            self.due[version] = self.due.get(version, 0) + num_groups

    def served(self, version: int, max_active: int | None = None) -> None:
        """Note that every engine serves a version. `max_active`: most active groups from now on; None, and at most: as
        many as keep the bound."""
        self.max_active = min(max_active or self.most_active, self.most_active)
        self.served_version = max(self.served_version, version)
        for due in [due for due in self.due if due <= self.served_version]:
            self.active -= self.due.pop(due)
