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
from penstock.metering.meters import COUNTER, Metric
from penstock.ui.grafana.promql import ACTOR, RUN, WAITING
from penstock.ui.grafana.promql import PANELS as ASK

_STARTED = f'__name__=~"{table.STORE_SEEN.exported}|{table.SERVE_ADAPTERS.exported}"'
"""Condition on the one series that each run has, and each server for a tenant."""
UID, TITLE = "penstock", "Penstock"
WIDTH, HEIGHT = 12, 8
"""Size of a panel, on Grafana's grid of 24 columns."""
SOURCE = DataSourceRef("prometheus", "${datasource}")
SECONDS, BYTES, SHARE, PER_SECOND, PLAIN = "s", "bytes", "percentunit", "cps", "short"
"""Grafana's names of units."""
OF_RUN = "{{run}} {{run_id}}"
"""Legend of a run."""
BY_ACTOR = f"{OF_RUN} {{{{actor}}}}"


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
    query = Query(ASK.rate(metric, (*RUN, label)), f"{OF_RUN} {{{{{label}}}}}")
    return Panel(title, unit, metric.description, (query,), metric.condition)


def _mean(metric: Metric, title: str, unit: str = SECONDS) -> Panel:
    """A panel of the mean of a summary, with a line for each run."""
    return Panel(title, unit, metric.description, (Query(ASK.mean(metric, RUN), OF_RUN),), metric.condition)


def _ratio(part: Metric, whole: Metric) -> str:
    """The ratio of two counters, by actor."""
    return f"{ASK.rate(part, ACTOR)} / {ASK.rate(whole, ACTOR)}"


OVERVIEW = (
    Panel(
        "Steps a minute", PLAIN, "Of the rank that has made most.",
        (Query(f"60 * max by (run, run_id) ({ASK.rate(table.TRAINER_STEPS, ACTOR)})", OF_RUN),),
    ),
    Panel(
        "Tokens a second", PER_SECOND, "What is sampled and not trained was dropped, or belongs to an evaluation.",
        (
            Query(ASK.rate(table.ROLLOUT_TOKENS, RUN), f"{OF_RUN} sampled"),
            Query(ASK.rate(table.TRAINER_TOKENS, RUN), f"{OF_RUN} trained"),
        ),
    ),
    Panel(
        "Who waits", SHARE, "Share of the time in which ranks wait for a batch, and in which engines have no request.",
        (
            Query(f"avg by (run, run_id) ({ASK.rate(table.TRAINER_PHASES, ACTOR, WAITING)})", f"{OF_RUN} ranks"),
            Query(f"1 - avg by (run, run_id) ({ASK.rate(table.ROLLOUT_BUSY, ACTOR)})", f"{OF_RUN} engines"),
        ),
    ),
    Panel(
        "Trainer against engine", PLAIN, table.STEP_MISMATCH.description,
        (Query(ASK.value(table.STEP_MISMATCH, RUN), OF_RUN),),
        table.STEP_MISMATCH.condition,
    ),
    Panel(
        "Members lost and replaced, in the last hour", PLAIN, table.RUN_LOST.description,
        (
            Query(ASK.growth(table.RUN_LOST, (*RUN, "member_role"), "1h"), f"{OF_RUN} {{{{member_role}}}} lost"),
            Query(
                ASK.growth(table.RUN_REPLACED, (*RUN, "member_role"), "1h"), f"{OF_RUN} {{{{member_role}}}} replaced"
            ),
        ),
        table.RUN_LOST.condition,
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
    _mean(table.ROLLOUT_LOAD, "Load of a version"),
    _rates(table.ROLLOUT_LOAD_PHASES, "Share of the time in loads", SHARE, "phase"),
)  # fmt: skip
TRAINER = (
    Panel(
        "Parts of a step", SECONDS, table.TRAINER_PHASES.description,
        (Query(
            f"{ASK.rate(table.TRAINER_PHASES, (*RUN, 'phase'))} / on (run, run_id) group_left () "
            f"{ASK.rate(table.TRAINER_STEPS, RUN)}",
            f"{OF_RUN} {{{{phase}}}}",
        ),),
    ),
    _rates(table.TRAINER_SAMPLES, "Samples a second", PER_SECOND),
    _gauge(table.TRAINER_FLOPS, "Model FLOP/s", "flops"),
    _gauge(table.TRAINER_MFU, "Share of the device's peak", SHARE),
    _gauge(table.TRAINER_MEMORY, "Most memory so far", BYTES),
)  # fmt: skip
STORE = (
    Panel(
        "Rows by stage and state", PLAIN, table.STORE_ROWS.description,
        (Query(ASK.value(table.STORE_ROWS, (*RUN, "stage", "state")), f"{OF_RUN} {{{{stage}}}} {{{{state}}}}"),),
    ),
    Panel(
        "Memory", BYTES, "Bytes of values, and what store.max_bytes allows.",
        (
            Query(ASK.value(table.STORE_BYTES, RUN), OF_RUN),
            Query(ASK.value(table.STORE_CAPACITY, RUN), f"{OF_RUN} allowed"),
        ),
    ),
    _rates(table.STORE_LEASE_WAIT, "Workers that wait for a lease", PLAIN, "stage"),
    _mean(table.STORE_STALENESS, "Staleness", "versions"),
    _rates(table.STORE_DROPPED, "Rows dropped a second", PER_SECOND, "reason"),
    Panel(
        "Rows admitted a second, and leases", PLAIN, "Leases are those that are held.",
        (
            Query(ASK.rate(table.STORE_ADMITTED, RUN), f"{OF_RUN} rows"),
            Query(ASK.value(table.STORE_LEASES, RUN), f"{OF_RUN} leases"),
        ),
    ),
)  # fmt: skip
REWARDS = (
    _rates(table.REWARD_SAMPLES, "Rewards a second", PER_SECOND),
    _mean(table.REWARD_LATENCY, "Time of a reward"),
    _rates(table.REWARD_ERRORS, "Errors a second", PER_SECOND, "reason"),
)
ENVIRONMENTS = (
    _rates(table.ENVIRONMENT_ATTEMPTS, "Attempts a second", PER_SECOND, "outcome"),
    _rates(table.ENVIRONMENT_TURNS, "Turns a second", PER_SECOND),
    _mean(table.ENVIRONMENT_ATTEMPT, "Time of an attempt"),
    _gauge(table.ENVIRONMENT_UNDER_WAY, "Attempts under way", PLAIN),
    _gauge(table.ENVIRONMENT_LIMIT, "Attempts that the engines' memory allows", PLAIN),
)
OF_TENANT = f"{OF_RUN} {{{{tenant}}}}"
TENANT = (*RUN, "tenant")


def _of_tenants(title: str, unit: str, *metrics: Metric) -> Panel:
    """A panel with a line for each tenant and metric: rates of counters, and values of gauges."""
    queries = []
    for metric in metrics:
        ask = ASK.rate if metric.kind == COUNTER else ASK.value
        words = metric.name.removeprefix("penstock_serve_").removesuffix("_total").replace("_", " ")
        queries.append(Query(ask(metric, TENANT), f"{OF_TENANT} {words}"))
    return Panel(title, unit, " ".join(metric.description for metric in metrics), tuple(queries), table.ON_SERVER)


SERVER = (
    Panel(
        "Requests a second", PER_SECOND, table.SERVE_REQUESTS.description,
        (Query(ASK.rate(table.SERVE_REQUESTS, (*TENANT, "kind")), f"{OF_TENANT} {{{{kind}}}}"),), table.ON_SERVER,
    ),
    _of_tenants("Failures and refusals a second", PER_SECOND, table.SERVE_FAILURES, table.SERVE_REFUSED),
    Panel(
        "Wait for ranks and engines", SECONDS, table.SERVE_WAIT.description,
        (Query(ASK.mean(table.SERVE_WAIT, (*TENANT, "place")), f"{OF_TENANT} {{{{place}}}}"),), table.ON_SERVER,
    ),
    _of_tenants("Tokens a second", PER_SECOND, table.SERVE_TRAINED, table.SERVE_SAMPLED),
    _of_tenants("Share of the time on ranks, requests on engines", PLAIN, table.SERVE_RANKS, table.SERVE_ENGINES),
    _of_tenants("Requests without a result", PLAIN, table.SERVE_WAITING),
    _of_tenants("Adapters", PLAIN, table.SERVE_ADAPTERS, table.SERVE_RESIDENT),
    _of_tenants("Bytes that wait and that are saved", BYTES, table.SERVE_WAITING_BYTES, table.SERVE_STORED),
)  # fmt: skip
ROWS: dict[str, tuple[Panel, ...]] = {
    "Run": OVERVIEW, "Engines": ENGINES, "Trainer": TRAINER, "Store": STORE, "Rewards": REWARDS,
    "Environments": ENVIRONMENTS, "Server": SERVER,
}  # fmt: skip
"""Panels of each row, by the row's title, in the order of the dashboard."""


def dashboard_json() -> str:
    board = (
        builders.Dashboard(TITLE).uid(UID).tags(["ray", "penstock"]).editable()
        .tooltip(DashboardCursorSync.CROSSHAIR).time("now-1h", "now").refresh("10s")
        .with_variable(builders.DatasourceVariable("datasource").type("prometheus").hide(VariableHide.HIDE_VARIABLE))
        .with_variable(_variable("SessionName", "Ray's session", ""))
        .with_variable(_variable("run", "Runs by their name", 'SessionName=~"$SessionName"'))
        .with_variable(_variable("run_id", "Runs of one name, by their id", 'SessionName=~"$SessionName",run=~"$run"'))
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
        .query(f"label_values({{{','.join(filter(None, (_STARTED, where)))}}}, {label})")
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
