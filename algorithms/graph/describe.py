"""A dataflow as a small text graph, for `penstock validate` and the documentation.

                                ┌────────────────────────────────┐
    ╭───────────────────────────┤ source               per group │
    │                           ├────────────────────────────────┤
    ├─── prompt_ids ───────────▶│ rollout              per group │
    ...

Stages stand in one column, each after all that it waits for. What a stage writes leaves it on the left and runs down a
rail of its own; where another stage reads some of it, an arrow with the columns' names branches off.
"""

import textwrap
from dataclasses import dataclass

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import Stage, name_of

WIDTH = 100
"""The most characters of a line (as long as names are not absurdly long)."""

_SHORTEST_LABEL = 24


@dataclass(frozen=True)
class _Row:
    """A line of the picture. `rail`: the rail that begins (`opens`) or is read from in this line; None: text alone."""

    rail: int | None
    opens: bool
    label: str
    text: str


def draw(flow: Dataflow) -> str:
    """The graph, lines joined by newlines, at most `WIDTH` wide. The dataflow must have passed `check`."""
    stages = in_order(flow)
    rails = [stage.name for stage in stages if _readers(flow, stage)]
    texts = {stage.name: _texts(flow, stage) for stage in stages}
    inner = max(len(text) for pair in texts.values() for text in pair)
    labels = max(_SHORTEST_LABEL, WIDTH - inner - 2 * len(rails) - 10)
    cells = [_cell(flow, stage, stages, rails, texts[stage.name], labels) for stage in stages]
    last_row = {row.rail: (c, r) for c, cell in enumerate(cells) for r, row in enumerate(cell) if row.rail is not None}
    left = 2 * len(rails) + max((len(row.label) for cell in cells for row in cell), default=0) + 6

    lines: list[str] = []
    active: set[int] = set()
    for c, cell in enumerate(cells):
        lines.append(_rail_part(active, None, left) + ("├" if c else "┌") + "─" * (inner + 2) + ("┤" if c else "┐"))
        for r, row in enumerate(cell):
            ends = row.rail is not None and last_row[row.rail] == (c, r)
            lines.append(_wiring(row, active, left, ends, 2 * len(rails)) + f" {row.text.ljust(inner)} │")
    lines.append(" " * left + "└" + "─" * (inner + 2) + "┘")
    unread = _unread(flow, stages)
    return "\n".join([*(line.rstrip() for line in lines), *([f"read by no stage: {unread}"] if unread else [])])


def in_order(flow: Dataflow) -> list[Stage]:
    """The stages, each after those that write what it reads; otherwise as they were added."""
    writers = {column.name: stage for stage in flow.stages for column in stage.writes}
    placed: dict[str, Stage] = {}

    def place(stage: Stage) -> None:
        if stage.name not in placed:
            for column in flow.reads_of(stage):
                place(writers[column])
            placed[stage.name] = stage

    for stage in flow.stages:
        place(stage)
    return list(placed.values())


def _texts(flow: Dataflow, stage: Stage) -> tuple[str, str]:
    """Texts of a stage's cell: name and unit, and a line about how it is done."""
    name = name_of(stage.function, "")
    of_what = "attempts a task" if stage.in_environment else "samples a prompt"
    details = {
        "source": "the dataset",
        "rollout": f"{stage.model}, {flow.samples_per_prompt} {of_what}",
        "greedy_rollout": f"{stage.model}, one at temperature 0",
        "filter": f"drops as {stage.reason}",
        "reward": name or (stage.rewarded.function if stage.rewarded is not None else "reward.function"),
        "logprobs": f"log-probabilities of {stage.model}",
        "compute": "" if name == stage.name else name,
        "scores": f"scores of {stage.model}",
        "values": f"what {stage.model} expects",
        "staleness": "updates since each token",
        "critic": f"{stage.model}, {name}",
        "train": "; ".join(f"{policy.name}, {name_of(policy.loss, '')}" for policy in stage.policies),
    }
    where = " (in the trainer)" if stage.is_in_trainer else ""
    return f"{stage.name}  per {stage.unit}", details[stage.kind] + where


def _cell(
    flow: Dataflow, stage: Stage, stages: list[Stage], rails: list[str], texts: tuple[str, str], width: int
) -> list[_Row]:
    """The rows of one stage: an arrow for each stage that it reads from, and where its own rail begins."""
    wiring: list[tuple[int | None, bool, str]] = []
    for writer in stages:
        shared = [column.name for column in writer.writes if column.name in flow.reads_of(stage)]
        if shared:
            first, *more = textwrap.wrap(", ".join(shared), width, break_long_words=False)
            wiring += [(rails.index(writer.name), False, first), *((None, False, label) for label in more)]
    if stage.name in rails:
        wiring.append((rails.index(stage.name), True, ""))
    while len(wiring) < sum(map(bool, texts)):
        wiring.insert(-1 if stage.name in rails else len(wiring), (None, False, ""))
    lines = [*filter(None, texts), *[""] * len(wiring)]
    return [_Row(rail, opens, label, text) for (rail, opens, label), text in zip(wiring, lines, strict=False)]


def _wiring(row: _Row, active: set[int], left: int, ends: bool, labels_at: int) -> str:
    """The line's part to the left of the cell's text, its border included. Keeps `active` up to date."""
    if row.rail is None:
        line = _rail_part(active, None, left)
        return line[: labels_at + 2] + row.label.ljust(left - labels_at - 2) + "│"
    line = _rail_part(active, row.rail, left)
    start = 2 * row.rail
    if row.opens:
        active.add(row.rail)
        return line[:start] + "╭" + line[start + 1 :] + "┤"
    if ends:
        active.discard(row.rail)
    arrow = f"{line[: labels_at + 1]} {row.label} ".ljust(left - 1, "─") + "▶"
    return arrow[:start] + ("╰" if ends else "├") + arrow[start + 1 :] + "│"


def _rail_part(active: set[int], begin: int | None, width: int) -> str:
    """Rails as they pass this line: `│`, or `┼` where a horizontal line from rail `begin` to the right crosses them."""
    line = [" "] * width if begin is None else [" "] * (2 * begin) + ["─"] * (width - 2 * begin)
    for rail in active:
        line[2 * rail] = "│" if begin is None or rail < begin else "┼"
    return "".join(line)


def _readers(flow: Dataflow, stage: Stage) -> list[str]:
    written = {column.name for column in stage.writes}
    return [other.name for other in flow.stages if written & set(flow.reads_of(other))]


def _unread(flow: Dataflow, stages: list[Stage]) -> str:
    """Columns that are written for metrics and samples alone."""
    read = {column for stage in stages for column in flow.reads_of(stage)}
    return ", ".join(column.name for stage in stages for column in stage.writes if column.name not in read)
