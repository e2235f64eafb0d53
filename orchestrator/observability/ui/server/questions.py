"""Questions that the page may ask below /api/, by name: what an address's words mean, and which answer is given.

A new question is a function here and a line in `QUESTIONS`.
"""

from collections.abc import Callable
from typing import Any

from starlette.datastructures import QueryParams

from penstock.orchestrator.observability.ui.runs.rollouts import Wanted
from penstock.orchestrator.observability.ui.server.answers import Answers

DEFAULT_POINTS = 1000
WANTED: dict[str, Callable[[str], Any]] = {
    "first_step": int, "last_step": int, "group": int, "least_reward": float, "most_reward": float,
    "least_tokens": int, "most_tokens": int, "finish_reason": str, "text": str, "sort": str, "offset": int,
    "limit": int,
}  # fmt: skip
"""Fields of `Wanted` that an address may have, with their types."""


def runs(answers: Answers, asked: QueryParams) -> Any:
    """Answer with the lines of all runs."""
    return answers.table()


def run(answers: Answers, asked: QueryParams) -> Any:
    """Answer about one run: run=…"""
    return answers.run(_run_of(asked))


def compare(answers: Answers, asked: QueryParams) -> Any:
    """Compare runs: run=…&run=…"""
    return answers.compared(asked.getlist("run"))


def series(answers: Answers, asked: QueryParams) -> Any:
    """Answer with the numbers of charts: run=…&key=…&key=…, points=…, first=…, last=…"""
    first, last = float(asked.get("first", "-inf")), float(asked.get("last", "inf"))
    points = int(asked.get("points", DEFAULT_POINTS))
    return answers.series(_run_of(asked), asked.getlist("key"), points, first, last)


def samples(answers: Answers, asked: QueryParams) -> Any:
    """Answer with a run's samples by a filter: run=…, fields of `Wanted`."""
    return answers.samples(_run_of(asked), wanted_of(asked))


def sample(answers: Answers, asked: QueryParams) -> Any:
    """Answer with a sample and its tokens: run=…&step=…&place=…"""
    return answers.sample(_run_of(asked), int(asked.get("step", "")), int(asked.get("place", "")))


def timeline(answers: Answers, asked: QueryParams) -> Any:
    """Answer with the timeline of some steps: run=…&first=…&last=…"""
    first, last = (int(asked[name]) if asked.get(name) else None for name in ("first", "last"))
    return answers.timeline(_run_of(asked), first, last)


def state(answers: Answers, asked: QueryParams) -> Any:
    """Answer with the state of a run: run=…"""
    return answers.state(_run_of(asked))


def logs(answers: Answers, asked: QueryParams) -> Any:
    """Answer with what actors printed: run=…&member=…&text=…&trouble=1"""
    return answers.logs(_run_of(asked), asked.get("member", ""), asked.get("text", ""), asked.get("trouble") == "1")


QUESTIONS: dict[str, Callable[[Answers, QueryParams], Any]] = {
    "runs": runs,
    "run": run,
    "compare": compare,
    "series": series,
    "samples": samples,
    "sample": sample,
    "timeline": timeline,
    "state": state,
    "logs": logs,
}
"""Questions by name. Each raises `NoSuchRun` or `LookupError` for what is not there, `ValueError` for words that mean
nothing."""


def wanted_of(asked: QueryParams) -> Wanted:
    """The filter of samples in an address. Raises `ValueError`."""
    found: dict[str, Any] = {}
    for name, kind in WANTED.items():
        if (value := asked.get(name, "")) != "":
            found[name] = kind(value)
    return Wanted(**found, down=asked.get("down", "1") != "0")


def _run_of(asked: QueryParams) -> str:
    return asked.get("run", "")
