"""What an event of the ledger asks of whoever drives it: values to free, callers to wake. Plain data.

Every event that can free or wake returns one of these; `service/waiting/pump.py` carries it out. Naming too many
callers costs a look at them, naming too few would leave somebody waiting for ever: tests hold every event to what has
become possible.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Effects:
    """Of one event."""

    freed: list[tuple[int, int]] = field(default_factory=list)
    """(group, mask of its rows): nobody will ask for their values again."""
    cleared: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    """(group, mask of its rows by column): these values are gone, or worth nothing without one that is."""
    answered: list[tuple[int, int]] = field(default_factory=list)
    """(lease, group): another lease has answered the rows of the group that this one held."""
    stages: int = 0
    """Bit s: more of stage s is free, or somebody holds less of it: those that wait for leases may get one."""
    rounds: int = 0
    """Bit s: a round of stage s was formed, ended or taken back: ranks that wait for one must look again."""
    credits: bool = False
    """A group that had to wait may be admitted."""
