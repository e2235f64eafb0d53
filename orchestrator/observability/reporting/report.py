"""The page about a run, made from its directory alone: `report.html` in one file, and the plots as PNGs beside it.

It is made at the end of a run and by `penstock report RUN`. What the page says is gathered here; how it looks is in
`templates/`. Its scripts and styles are those of `charts/static/`, as text. What a run lacks (steps, samples, metrics)
is left out of its page. Pictures are small, each once as a rule of the page's style, and up to a size in all:

    text with marks, or a message's parts ─▶ `of_text`, `of_parts` ─▶ pieces: texts, and pictures at their places
                                                                   ─▶ `style`: a rule for each picture
"""

import base64
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from penstock.orchestrator.observability import charts
from penstock.orchestrator.observability.charts.cards import cards, elapsed
from penstock.orchestrator.observability.charts.chart import Chart, drawn, write_pngs
from penstock.orchestrator.observability.charts.known_curves import with_known
from penstock.orchestrator.observability.charts.themes import charts_of
from penstock.orchestrator.observability.differences import differences_of
from penstock.orchestrator.observability.faults import FaultTimeline, duration_s, faults_of
from penstock.orchestrator.observability.marks import marks_of
from penstock.orchestrator.observability.runs.columns import Columns
from penstock.orchestrator.observability.runs.found import ENDED
from penstock.orchestrator.observability.runs.own_files import read_own
from penstock.orchestrator.run_directory.fetching import fetch_files, open_at, upload_all
from penstock.orchestrator.run_directory.picture_folder import COLUMN, FOLDER, MOST_BYTES, NAME
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_lock import last_start_or_end
from penstock.workers.prompts.row_pictures import MARK

SHOWN, OPENED = 120, 400
"""Longest edges of a picture at its place and once it is clicked, in pixels: of what the page holds, too."""
AS_IT_IS = 1 << 15
"""Bytes up to which a picture is embedded as it is, if it is no larger than `OPENED`."""
IN_ALL = 1 << 21
"""Most bytes of a page's pictures. Further ones are told in words."""
QUALITY = 80
"""JPEG's, of pictures that are made smaller."""


@dataclass(frozen=True)
class Shown:
    """A picture at a place."""

    text: str
    """The picture in words: `[picture 56x84, 2.1 kB]`."""
    rule: str | None = None
    """Class of the page's style that shows it; None: it is told in words."""


Piece = str | Shown


class EmbeddedPictures:
    """Lifecycle: `of_text` and `of_parts` for each text, then `style`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._known: dict[str, Shown] = {}
        self._rules: list[str] = []
        self._left_bytes = IN_ALL

    @property
    def style(self) -> str:
        return "\n".join(self._rules)

    def of_text(self, text: str, names: Sequence[Any], clip: Callable[[str], str]) -> list[Piece]:
        """Pieces of a prompt's last text: its marks are the last pictures, and what stands before it had the others.
        `names`: those in `pictures/`; None for one that was not kept. `clip`: the text, or its beginning."""
        if not names:
            return [clip(text)]
        num_earlier = max(0, len(names) - text.count(MARK))
        first, *rest = clip(text).split(MARK)
        pieces: list[Piece] = [*map(self._shown, names[:num_earlier]), first]
        for number, after in enumerate(rest, num_earlier):
            pieces += [self._shown(names[number]) if number < len(names) else MARK, after]
        return pieces

    def of_parts(self, parts: Sequence[Any], names: Sequence[Any], clip: Callable[[str], str]) -> list[Piece]:
        """Pieces of a message in parts. `clip`: as `of_text` takes it."""
        return [
            self._shown(_entry(names, part.get("picture")))
            if isinstance(part, dict) and part.get("type") == "image"
            else clip(str(part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part))
            for part in parts
        ]

    def _shown(self, name: Any) -> Shown:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return Shown("[picture, which was not kept]")
        if name not in self._known:
            self._known[name] = self._embedded(name)
        return self._known[name]

    def _embedded(self, name: str) -> Shown:
        from PIL import Image

        try:
            data = read_own(self._run, f"{FOLDER}/{name}", MOST_BYTES)
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
                text = f"[picture {image.width}x{image.height}, {len(data) / 1000:,.1f} kB]"
                kind, small, size = _small(image, data)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return Shown("[picture, which cannot be read]")
        if len(small) > self._left_bytes:
            return Shown(text)
        self._left_bytes -= len(small)
        rule = f"picture-{len(self._rules)}"
        self._rules.append(_rule(rule, size, f"data:image/{kind};base64,{base64.b64encode(small).decode()}"))
        return Shown(text, rule)


def _entry(names: Sequence[Any], number: Any) -> Any:
    return names[number] if isinstance(number, int) and 0 <= number < len(names) else None


def _small(image: Any, data: bytes) -> tuple[str, bytes, tuple[int, int]]:
    """Format, bytes and size of what is embedded. Raises what PIL does."""
    from PIL import ImageOps

    if len(data) <= AS_IT_IS and max(image.size) <= OPENED:
        return str(image.format).lower(), data, image.size
    turned = ImageOps.exif_transpose(image)
    turned.thumbnail((OPENED, OPENED))
    written = io.BytesIO()
    turned.convert("RGB").save(written, "JPEG", quality=QUALITY)
    return "jpeg", written.getvalue(), turned.size


def _rule(name: str, size: tuple[int, int], url: str) -> str:
    """The rule of a picture: small, and once it has the focus as large as it is, or a whole number of times as large.

    >>> _rule("one", (40, 60), "data:")
    '.one{width:40px;height:60px;background-image:url(data:)}.one:focus{width:240px;height:360px}'
    """
    longest = max(size)
    small = [round(edge * min(1.0, SHOWN / longest)) or 1 for edge in size]
    large = [edge * max(1, OPENED // longest) for edge in size]
    open_at = f".{name}{{width:{small[0]}px;height:{small[1]}px;background-image:url({url})}}"
    return open_at + f".{name}:focus{{width:{large[0]}px;height:{large[1]}px}}"


TEMPLATES = Path(__file__).parent / "templates"
STATIC = Path(charts.__file__).parent / "static"
SCRIPT = ("colors.js", "dom.js", "chart.js", "board.js", "report.js")
_IMPORT = re.compile(r"^import .*$\n?", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async |class |const |function )", re.MULTILINE)
MAX_EVENTS = 60
MAX_ROWS = 32
MAX_CHARACTERS = 1500
"""Most rows of samples, and most characters of a text in them."""


def report_of(run: str, price: float = 0.0) -> str:
    """Rebuild the report of the run in a directory or at a URL, where it is brought with all that is missing there.
    `price`: money for an hour of a GPU; 0: not given. Returns the page's place. Raises `ConfigError` if there is no
    run, `CheckpointError` for a URL that does not take it."""
    with open_at(run, more=_last_samples) as directory:
        fetch_files(directory, _pictures(directory))
        page = write_report(directory.path, price=price)
        if directory.url is None:
            return str(page)
        upload_all(directory)
        return f"{directory.url}/{page.name}"


def write_report(path: str | Path, *, pngs: bool = True, price: float = 0.0) -> Path:
    """(Re)build report.html and plots/ of the run in `path`; returns the page. Raises `ConfigError` if there is no
    run."""
    directory = RunDirectory.open(path)
    config = directory.read_config()
    columns = Columns(directory.metrics_file)
    columns.update()
    charts = with_known(charts_of(columns.keys, config), config)
    directory.write_text("report.html", page(directory, config, charts, columns, price))
    if pngs:
        write_pngs(charts, columns, directory.plots, marks_of(directory.read_events()))
    return directory.report


def _last_samples(names: Sequence[str]) -> list[str]:
    """Name of the newest file of samples, as the page shows what was trained last."""
    steps = {int(found[1]): name for name in names if (found := re.fullmatch(r"samples/step_(\d+)\.parquet", name))}
    return [steps[max(steps)]] if steps else []


def _pictures(directory: RunDirectory) -> list[str]:
    """Names of the files with the pictures that the page shows."""
    named = (name for row in read_rows(directory)[1] for name in row.get(COLUMN) or ())
    return [f"{FOLDER}/{name}" for name in dict.fromkeys(named) if NAME.fullmatch(str(name))]


def page(
    directory: RunDirectory, config: Mapping[str, Any], charts: Sequence[Chart], columns: Columns, price: float = 0.0
) -> str:
    """The whole HTML document. `price`: money for an hour of a GPU."""
    events = directory.read_events()
    faults = faults_of(events)
    pictures = EmbeddedPictures(directory.path)
    samples_step, rows = read_rows(directory)
    samples = sample_rows(rows, pictures)
    shown = events if len(events) <= MAX_EVENTS else [*events[: MAX_EVENTS // 2], *events[-MAX_EVENTS // 2 :]]
    template = _environment().get_template("report.html.j2")
    return template.render(
        name=str(config.get("name") or directory.path.name),
        description=config.get("description") or "",
        state=_state(events),
        facts=_facts(config, events),
        cards=cards(columns, config, events, duration_s(events), price),
        numbers={
            "charts": [chart.plain() for chart in charts],
            "curves": drawn(charts, columns),
            "marks": [mark.plain() for mark in marks_of(events)],
        },
        style="\n".join(map(static, ("vendor/uPlot.min.css", "style.css"))),
        library=static("vendor/uPlot.iife.min.js"),
        script=script(*SCRIPT),
        faults=faults,
        timeline=FaultTimeline.of(faults, duration_s(events)),
        samples_step=samples_step,
        samples=samples,
        pictures=pictures.style,
        events=[_event(event) for event in shown],
        num_hidden_events=len(events) - len(shown),
        config_changed=_yaml(differences_of(config)),
        config_whole=_yaml(config),
    )


@cache
def script(*modules: str) -> str:
    """Several modules of the page as one script. `modules`: in the order in which they need each other. A module
    imports by lines of its own, and no two define the same name. So modules that are put one after the other, without
    their imports and exports, are one script."""
    text = "\n".join(_EXPORT.sub("", _IMPORT.sub("", static(module))) for module in modules)
    if left := re.search(r"^\s*(import|export)\b.*$", text, re.MULTILINE):
        raise ValueError(f"{modules}: {left[0]} stands in the way of one script.")
    return text


def static(name: str) -> str:
    """The text of a file of the page."""
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    """The template environment, made once: it keeps the templates that it has compiled."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value: "" if value is None else f"{value:.3g}"
    environment.filters["elapsed"] = elapsed
    environment.filters["px"] = lambda value: f"{value:.1f}"
    environment.filters["path"] = lambda points: " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return environment


def _facts(config: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts for below the title; None: unknown."""
    return {
        "recipe": Path(str(config["recipe"])).name if config.get("recipe") else None,
        "algorithm": (config.get("algorithm") or {}).get("name"),
        "engine": (config.get("rollout") or {}).get("engine"),
        "max_staleness": config.get("max_staleness"),
        "seed": config.get("seed"),
        "started": str(events[0].get("time", ""))[:19].replace("T", " ") + " UTC" if events else None,
    }


def _state(events: Sequence[Mapping[str, Any]]) -> str:
    """The end of the run in words, by its last turn."""
    return ENDED.get(str(last_start_or_end(events).get("kind")), "not finished")


def _event(event: Mapping[str, Any]) -> dict[str, str]:
    facts = {key: value for key, value in event.items() if key not in ("time", "kind") and value is not None}
    return {
        "time": str(event.get("time", ""))[11:19],
        "kind": str(event.get("kind", "")),
        "details": ", ".join(f"{key}={_short(value)}" for key, value in facts.items()),
    }


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return _clip(text, 400)


def _yaml(value: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=100))


@dataclass(frozen=True)
class SampleRow:
    prompt: list[Piece]
    """The prompt's text, with its pictures at their places."""
    response: str
    answer: str
    reward: float | None
    advantage: float | None
    versions: str
    """Versions of the tokens: `4`, or `3-4` where the weights changed in between."""
    first_of_group: bool
    said: list[tuple[str, list[Piece]]] = field(default_factory=list)
    """Roles and contents of a trajectory's messages, in order; empty for a prompt with one response."""


def read_rows(directory: RunDirectory) -> tuple[int, list[dict[str, Any]]]:
    """Read what was trained last, from the newest `samples/step_N.parquet` that can be read. Returns (step, rows);
    (0, []) without one."""
    from pyarrow import ArrowException, parquet

    for file in reversed(directory.sample_files()):
        try:
            table = parquet.read_table(file).slice(0, MAX_ROWS)
        except (ArrowException, OSError):
            continue
        return int(re.sub(r"\D", "", file.stem) or 0), table.to_pylist()
    return 0, []


def _mean(value: float | Sequence[float | None] | None) -> float | None:
    """A row's advantage: a number, or the mean of its tokens'."""
    if not isinstance(value, Sequence):
        return value
    known = [one for one in value if one is not None]
    return fmean(known) if known else None


def sample_rows(rows: Sequence[Mapping[str, Any]], pictures: EmbeddedPictures) -> list[SampleRow]:
    """The rows of samples as the page tells them. `pictures`: those of the page, of which there are more then."""
    result, last_prompt = [], None
    for row in rows:
        task = _task(row)
        prompt = str(row.get("prompt") or task.get("prompt") or "")
        response = _clip(str(row.get("response_text") or row.get("response") or task.get("response") or ""))
        answer = _clip(str(task.get("answer") if task.get("answer") is not None else ""))
        versions = [version for version in row.get("token_versions") or [] if version is not None]
        low, high = (min(versions), max(versions)) if versions else (None, None)
        shown = "" if low is None else f"{low}" if low == high else f"{low}-{high}"
        names = row.get(COLUMN) or []
        said = _said(row, pictures)
        begin = (str(task.get("environment_task", prompt)), []) if said else (prompt, names)
        first = begin != last_prompt
        pieces = [] if said else pictures.of_text(prompt, names, _clip)
        advantage = _mean(row.get("advantage"))
        result.append(SampleRow(pieces, response, answer, row.get("reward"), advantage, shown, first, said))
        last_prompt = begin
    return result


def _said(row: Mapping[str, Any], pictures: EmbeddedPictures) -> list[tuple[str, list[Piece]]]:
    """The conversation of a `transcript`, calls of tools included."""
    try:
        messages = json.loads(row.get("transcript") or "[]")
    except (TypeError, json.JSONDecodeError):
        return []
    found = []
    for message in messages:
        if isinstance(message, dict):
            content = message.get("content")
            if isinstance(content, list):
                seen = pictures.of_parts(content, row.get(COLUMN) or [], _clip)
                pieces = [*seen, _clip(_text(message | {"content": None}))]
            else:
                pieces = [_clip(_text(message))]
            found.append((" ".join(str(message[key]) for key in ("role", "policy") if key in message), pieces))
    return found


def _text(message: Mapping[str, Any]) -> str:
    thinking = message.get("reasoning_content")
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    parts = [f"({thinking})" if thinking else "", str(message.get("content") or "")]
    return "\n".join(filter(None, [*parts, *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]))


def _task(row: Mapping[str, Any]) -> dict[str, Any]:
    """The dataset's row, which the `task` column has as JSON."""
    try:
        task = json.loads(row.get("task") or "{}")
    except (TypeError, json.JSONDecodeError):
        return {}
    return task if isinstance(task, dict) else {}


def _clip(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
