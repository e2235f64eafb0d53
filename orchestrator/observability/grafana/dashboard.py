"""The panels as a dashboard of Grafana's, of the same shape as those that Ray brings: two panels a row, Ray's variable
for sessions, and one to choose the Prometheus.
"""

import itertools

from grafana_foundation_sdk.builders import common, prometheus, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode, VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from penstock.metering.table import STORE_SEEN
from penstock.orchestrator.observability.grafana.panels import ROWS, Panel

UID, TITLE = "penstock", "Penstock"
WIDTH, HEIGHT = 12, 8
"""Size of a panel, on Grafana's grid of 24 columns."""
SOURCE = DataSourceRef("prometheus", "${datasource}")


def dashboard_json() -> str:
    board = (
        builders.Dashboard(TITLE).uid(UID).tags(["ray", "penstock"]).editable()
        .tooltip(DashboardCursorSync.CROSSHAIR).time("now-1h", "now").refresh("10s")
        .with_variable(builders.DatasourceVariable("datasource").type("prometheus").hide(VariableHide.HIDE_VARIABLE))
        .with_variable(_variable("SessionName", "Ray's session", ""))
        .with_variable(_variable("run", "Runs by their name", 'SessionName=~"$SessionName"'))
    )  # fmt: skip
    numbers = itertools.count(1)
    for title, panels in ROWS.items():
        board.with_row(builders.Row(title).id(next(numbers)))
        for panel in panels:
            board.with_panel(_panel(panel).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build())


def _variable(label: str, description: str, where: str) -> builders.QueryVariable:
    """A variable of the values of a label, all of them chosen at first."""
    return (
        builders.QueryVariable(label).description(description).datasource(SOURCE)
        .query(f"label_values({STORE_SEEN.exported}{{{where}}}, {label})")
        .include_all(True).all_value(".+").multi(True).current(VariableOption(text=["All"], value=["$__all"]))
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    )  # fmt: skip


def _panel(panel: Panel) -> timeseries.Panel:
    note = f" There with: {panel.condition}." if panel.condition else ""
    made = (
        timeseries.Panel().title(panel.title).description(panel.description + note).unit(panel.unit)
        .datasource(SOURCE).height(HEIGHT).span(WIDTH).show_points(VisibilityMode.NEVER).axis_soft_min(0)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .legend(common.VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
    )  # fmt: skip
    for letter, query in zip("ABCDEF", panel.queries, strict=False):
        made.with_target(
            prometheus.Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend).range()
            .datasource(SOURCE)
        )  # fmt: skip
    return made
