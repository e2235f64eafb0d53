"""Time that the page takes in a real browser, and memory of its server."""

import contextlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from benchmarks.harness import ROOT, Target
from tests.ui.browser import chromium, visit

START_S = 60
SETTLE_MS = 300
"""Pause in milliseconds for the sample that is opened after the list."""
INDEX_S = 600
"""Deadline of the index of all samples, in seconds."""
PAINTED = """() => new Promise((resolve) => {
  const inView = (chart) => chart.getBoundingClientRect().top < innerHeight;
  const look = () => {
    const charts = [...document.querySelectorAll('section.chart')].filter(inView);
    if (charts.length && charts.every((chart) => chart.querySelector('canvas')))
      requestAnimationFrame(() => setTimeout(() => resolve(performance.now()))); // after the frame that paints them
    else requestAnimationFrame(look);
  };
  look();
})"""
"""Script that measures the milliseconds from the navigation until all charts in view are painted."""
FILTERED = """([name, value]) => new Promise((resolve) => {
  const list = document.querySelector('.samples');
  const field = document.querySelector(`[name="${name}"]`) ?? document.querySelector('[aria-label="sort"]');
  const started = performance.now();
  const seen = new MutationObserver(() => {
    seen.disconnect();
    requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - started)));
  });
  seen.observe(list, { childList: true });
  field.value = value;
  field.dispatchEvent(new Event('change'));
})"""
"""Script that measures the milliseconds from a filter's change until the list of samples is painted anew."""
FILTERS = (
    ("all by reward", "sort", "reward"), ("all by length", "sort", "tokens"), ("all by step", "sort", "step"),
    ("reward at least", "least_reward", "0.9"), ("one group", "group", "4321"), ("any group", "group", ""),
    ("how it ended", "finish_reason", "stop"), ("from a step on", "first_step", "2000"),
)  # fmt: skip
"""Filters, each on top of those before it."""
TEXT = ("text", "text", "eleven eleven")


def rounds(place: Path, num_rounds: int) -> list[dict[str, Any]]:
    """Measure rounds, each with its own server."""
    found: list[dict[str, Any]] = []
    with chromium() as browser:
        with server(place) as (_, address):
            first_paint(browser, address)  # the browser's own first page is slow
        for _ in range(num_rounds):
            with server(place) as (process, address):
                found += [
                    {"part": "first paint, server cold", "ms": first_paint(browser, address)},
                    {"part": "first paint, server warm", "ms": first_paint(browser, address)},
                    *filters(browser, address),
                ]
                look_at_all(browser, address, place)
                found.append({"part": "memory", **memory(process)})
    return found


@contextlib.contextmanager
def server(place: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start `penstock ui`. Yields it, once it listens, and its address."""
    command = [sys.executable, "-m", "penstock.cli.main", "ui", str(place), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if " at http://" in line), "")
        yield process, line.split(" at ")[1].strip().rstrip("/")
    finally:
        process.terminate()
        process.wait(START_S)


def first_paint(browser: Browser, address: str) -> float:
    """Milliseconds until the first paint of a run's page, in a browser that has nothing of it yet."""
    with visit(browser) as page:
        page.goto(f"{address}/#/run/run0", wait_until="commit")
        return float(page.evaluate(PAINTED))


def filters(browser: Browser, address: str) -> list[dict[str, Any]]:
    with visit(browser) as page:
        page.goto(f"{address}/#/rollouts/run0")
        started = time.perf_counter()
        wait_for_index(page)
        found = [{"part": "index of all samples", "ms": 1000 * (time.perf_counter() - started)}]
        for title, name, value in (*FILTERS, TEXT):
            ms = float(page.evaluate(FILTERED, [name, value]))
            page.wait_for_timeout(SETTLE_MS)
            found.append({"part": f"filter, {title}", "ms": ms})
        return found


def wait_for_index(page: Page) -> None:
    deadline = time.monotonic() + INDEX_S
    while not re.fullmatch(r"[\d,]+ samples\.", page.locator("p.faint").first.inner_text()):
        if time.monotonic() > deadline:
            raise SystemExit(f"the index is not whole within {INDEX_S} s")
        page.wait_for_timeout(100)


def look_at_all(browser: Browser, address: str, place: Path) -> None:
    """Look at every run, so that its numbers are in memory."""
    names = ",".join(sorted(path.name for path in place.iterdir()))
    with visit(browser) as page:
        page.goto(f"{address}/#/compare/{names}", wait_until="commit")
        page.evaluate(PAINTED)


def memory(process: "subprocess.Popen[str]") -> dict[str, float]:
    """Memory that is resident, and was at most, in MiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    now, most = (int(re.search(rf"{key}:\s+(\d+)", status)[1]) / 1024 for key in ("VmRSS", "VmHWM"))  # type: ignore[index]
    return {"mib": now, "most_mib": most}


def median(rows: list[dict[str, Any]], part: str, what: str = "ms") -> float:
    return statistics.median(row[what] for row in rows if row["part"] == part)


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    slowest = max(median(rows, f"filter, {title}") for title, _, _ in FILTERS)
    return [
        Target("first paint of a run's charts, server just started", median(rows, "first paint, server cold") / 1000,
               "s", "<=", 1.0),
        Target("a filter on 1,000,000 samples, the slowest", slowest, "ms", "<=", 300),
        Target("memory of the server", median(rows, "memory", "mib"), "MiB", "<=", 300),
    ]  # fmt: skip
