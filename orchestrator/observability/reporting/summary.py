"""The cards of a run, from its directory."""

from penstock.orchestrator.observability.summary.cards import Card, cards
from penstock.orchestrator.observability.summary.faults import duration_s
from penstock.orchestrator.observability.ui.runs.columns import Columns
from penstock.orchestrator.run_directory.run_directory import RunDirectory


def cards_of(directory: RunDirectory) -> list[Card]:
    """The cards of a run. Raises `ConfigError` where there is no run, `OSError` where it cannot be read."""
    columns = Columns(directory.metrics_file)
    columns.update()
    events = directory.read_events()
    return cards(columns, directory.read_config(), events, duration_s(events))
