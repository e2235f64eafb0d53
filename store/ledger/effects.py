"""Effects of an event of the ledger, for its driver to carry out: values to free, callers to wake. Plain data.

Every event that can free or wake returns one of these; `service/waiting/waiters.py` carries it out. Naming too many
callers costs a look at them, naming too few would leave a caller waiting for ever: tests hold every event to what has
become possible.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Effects:
    """The effects of one event."""

    freed: list[tuple[int, int]] = field(default_factory=list)
    """Rows that ended: (group, mask of its rows). No caller will ask for their values again."""
    cleared: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    """Values that are gone, or worth nothing without one that is: (group, mask of its rows by column)."""
    superseded: list[tuple[int, int]] = field(default_factory=list)
    """Leases whose rows another lease has written first: (lease, group), the group that this one held."""
    stages: int = 0
    """Stages of which more is free, or a client holds less: bit s for stage s. Callers that wait for leases may get
    one."""
    rounds: int = 0
    """Stages of which a round was formed, ended or taken back: bit s for stage s. Ranks that wait for one must look
    again."""
    credits: bool = False
    """True if a group that had to wait may be admitted."""
