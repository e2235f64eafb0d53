"""The dashboard of Grafana's: its panels row by row, and their JSON. It has the shape of those that Ray brings: two
panels a row, Ray's variable for sessions, and one to choose the Prometheus.
"""

import itertools
from dataclasses import dataclass

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

from penstock.metering import table
from penstock.metering.meters import Metric
from penstock.orchestrator.observability.grafana.promql import PANELS as ASK
from penstock.orchestrator.observability.grafana.promql import WAITING

UID, TITLE = "penstock", "Penstock"
WIDTH, HEIGHT = 12, 8
"""Size of a panel, on Grafana's grid of 24 columns."""
SOURCE = DataSourceRef("prometheus", "${datasource}")
SECONDS, BYTES, SHARE, PER_SECOND, PLAIN = "s", "bytes", "percentunit", "cps", "short"
"""Grafana's names of units."""
RUN, ACTOR = ("run",), ("run", "actor")
BY_ACTOR = "{{run}} {{actor}}"
BUSY = f"{ASK.rate(table.ROLLOUT_BUSY, ACTOR)} and on (run, actor) {ASK.value(table.ROLLOUT_RUNNING, ACTOR)}"
"""Query of the busy share of engines that are there: counters of ended ones stay, gauges do not."""


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    description: str
    queries: tuple[Query, ...]
    condition: str = ""
    """Condition under which there is something to show; empty: always."""


def _gauge(metric: Metric, title: str, unit: str) -> Panel:
    """A panel of a gauge, with a line for each actor."""
    return Panel(title, unit, metric.description, (Query(ASK.value(metric, ACTOR), BY_ACTOR),), metric.condition)


def _rates(metric: Metric, title: str, unit: str, label: str = "actor") -> Panel:
    """A panel of a rate by the second, with a line for each actor, or for each value of another label."""
    query = Query(ASK.rate(metric, ("run", label)), f"{{{{run}}}} {{{{{label}}}}}")
    return Panel(title, unit, metric.description, (query,), metric.condition)


def _spread(metric: Metric, title: str, unit: str = SECONDS, labels: tuple[str, ...] = ()) -> Panel:
    """A panel of the median and the 95th percentile of all runs that are chosen."""
    of = "".join(f" {{{{{label}}}}}" for label in labels)
    queries = (
        Query(ASK.quantile(0.5, metric, labels), f"median{of}"), Query(ASK.quantile(0.95, metric, labels), f"95%{of}"),
    )  # fmt: skip
    return Panel(title, unit, metric.description, queries, metric.condition)


def _ratio(part: Metric, whole: Metric) -> str:
    """The ratio of two counters, by actor."""
    return f"{ASK.rate(part, ACTOR)} / {ASK.rate(whole, ACTOR)}"


OVERVIEW = (
    Panel(
        "Steps a minute", PLAIN, "Of the rank that has made most.",
        (Query(f"60 * max by (run) ({ASK.rate(table.TRAINER_STEPS, ACTOR)})", "{{run}}"),),
    ),
    Panel(
        "Tokens a second", PER_SECOND, "What is sampled and not trained was dropped, or belongs to an evaluation.",
        (
            Query(ASK.rate(table.ROLLOUT_TOKENS, RUN), "{{run}} sampled"),
            Query(ASK.rate(table.TRAINER_TOKENS, RUN), "{{run}} trained"),
        ),
    ),
    Panel(
        "Who waits", SHARE, "Share of the time in which ranks wait for a batch, and in which engines have no request.",
        (
            Query(f"avg by (run) ({ASK.sum_rate(table.TRAINER_PHASES, ACTOR, WAITING)})", "{{run}} ranks"),
            Query(f"1 - avg by (run) ({BUSY})", "{{run}} engines"),
        ),
    ),
    Panel(
        "Trainer against engine", PLAIN, table.TRAINER_MISMATCH.description,
        (Query(ASK.value(table.TRAINER_MISMATCH, RUN), "{{run}}"),),
    ),
    Panel(
        "Members lost and replaced, in the last hour", PLAIN, table.RUN_LOST.description,
        (
            Query(ASK.increase(table.RUN_LOST, ("run", "member_role"), "1h"), "{{run}} {{member_role}} lost"),
            Query(ASK.increase(table.RUN_REPLACED, ("run", "member_role"), "1h"), "{{run}} {{member_role}} replaced"),
        ),
    ),
)  # fmt: skip
ENGINES = (
    _rates(table.ROLLOUT_TOKENS, "Tokens a second, by engine", PER_SECOND),
    _rates(table.ROLLOUT_SAMPLES, "Responses a second", PER_SECOND),
    Panel(
        "Sequences", PLAIN, "That an engine decodes, and that wait for room in it.",
        (
            Query(ASK.value(table.ROLLOUT_RUNNING, ACTOR), f"{BY_ACTOR} running"),
            Query(ASK.value(table.ROLLOUT_WAITING, ACTOR), f"{BY_ACTOR} waiting"),
        ),
    ),
    _gauge(table.ROLLOUT_KV_CACHE, "KV cache in use", SHARE),
    Panel(
        "Prompt tokens found in the prefix cache", SHARE, table.ROLLOUT_PREFIX_HITS.description,
        (Query(_ratio(table.ROLLOUT_PREFIX_HITS, table.ROLLOUT_PREFIX_LOOKUPS), BY_ACTOR),),
        table.ROLLOUT_PREFIX_HITS.condition,
    ),
    _spread(table.ROLLOUT_LOAD, "Load of a version"),
    _rates(table.ROLLOUT_LOAD_PHASES, "Share of the time in phases of loads", SHARE, "phase"),
)  # fmt: skip
TRAINER = (
    Panel(
        "Parts of a step", SECONDS, table.TRAINER_PHASES.description,
        (Query(ASK.mean(table.TRAINER_PHASES, ("run", "phase")), "{{run}} {{phase}}"),),
    ),
    _rates(table.TRAINER_SAMPLES, "Samples a second", PER_SECOND),
    _gauge(table.TRAINER_FLOPS, "Model FLOP/s", "flops"),
    _gauge(table.TRAINER_MFU, "Share of the device's peak", SHARE),
    _gauge(table.TRAINER_MEMORY, "Most memory so far", BYTES),
)  # fmt: skip
STORE = (
    Panel(
        "Rows by stage and state", PLAIN, table.STORE_ROWS.description,
        (Query(ASK.value(table.STORE_ROWS, ("run", "stage", "state")), "{{run}} {{stage}} {{state}}"),),
    ),
    Panel(
        "Memory", BYTES, "Bytes of values, and what store.max_bytes allows.",
        (
            Query(ASK.value(table.STORE_BYTES, RUN), "{{run}}"),
            Query(ASK.value(table.STORE_CAPACITY, RUN), "{{run}} allowed"),
        ),
    ),
    _spread(table.STORE_LEASE_WAIT, "Wait for a lease", labels=("stage",)),
    _spread(table.STORE_STALENESS, "Staleness", "versions"),
    _rates(table.STORE_DROPPED, "Rows dropped a second", PER_SECOND, "reason"),
    Panel(
        "Rows admitted a second, and leases", PLAIN, "Leases are those that are held.",
        (
            Query(ASK.rate(table.STORE_ADMITTED, RUN), "{{run}} rows"),
            Query(ASK.value(table.STORE_LEASES, RUN), "{{run}} leases"),
        ),
    ),
)  # fmt: skip
REWARDS = (
    _rates(table.REWARD_SAMPLES, "Rewards a second", PER_SECOND),
    _spread(table.REWARD_LATENCY, "Time of a reward"),
    _rates(table.REWARD_ERRORS, "Errors a second", PER_SECOND, "reason"),
)
ENVIRONMENTS = (
    _rates(table.ENVIRONMENT_ATTEMPTS, "Attempts a second", PER_SECOND, "outcome"),
    _rates(table.ENVIRONMENT_TURNS, "Turns a second", PER_SECOND),
    _spread(table.ENVIRONMENT_ATTEMPT, "Time of an attempt"),
)
ROWS: dict[str, tuple[Panel, ...]] = {
    "Run": OVERVIEW, "Engines": ENGINES, "Trainer": TRAINER, "Store": STORE, "Rewards": REWARDS,
    "Environments": ENVIRONMENTS,
}  # fmt: skip
"""Panels of each row, by the row's title, in the order of the dashboard."""


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
        .query(f"label_values({table.STORE_SEEN.exported}{{{where}}}, {label})")
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
