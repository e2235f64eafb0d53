"""Failures that a new process can help with, which is asked before anything is restarted."""

from penstock.orchestrator.cluster.failures import Kind, kind_of
from penstock.orchestrator.cluster.ray_calls import translate


def is_recoverable(error: Exception) -> bool:
    """Return whether a new process can help: after deaths of processes, missed deadlines, partners and nodes that are
    gone, and other errors of Ray. Errors of data, settings, the user's code or Penstock's own would come again."""
    return kind_of(translate(error, "a member")) is not Kind.ERROR
