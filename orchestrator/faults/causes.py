"""Which failures a new process can help with. Asked by `supervisor.py` before anything is restarted."""

from penstock.orchestrator.failures import Kind, kind_of
from penstock.orchestrator.ray_calls import translate


def is_recoverable(error: Exception) -> bool:
    """Deaths of processes, missed deadlines, partners and nodes that are gone, and whatever else Ray itself reports.
    Not errors of data, settings, the user's code or Penstock's own: they would come again."""
    return kind_of(translate(error, "a member")) is not Kind.ERROR
