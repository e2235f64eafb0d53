"""What holds of each page: it is quiet, fits a phone, loads nothing from elsewhere, and keys work."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from penstock.orchestrator.observability.reporting.report import write_report
from tests.ui.browser import PHONE, WIDE, visit

pytestmark = pytest.mark.real

PAGES = {
    "runs": ("#/", "tr[data-run=done]"),
    "run": ("#/run/done", "#chart-reward canvas"),
    "failed run": ("#/run/failed", ".notice"),
    "live run": ("#/run/live", ".state.running"),
    "compare": ("#/compare/sweep%2Fa,sweep%2Fb,done", "#chart-reward canvas"),
    "rollouts": ("#/rollouts/done", "pre.tokens span"),
    "pictures": ("#/rollouts/seen", "button.picture img"),
    "no samples": ("#/rollouts/failed", "p.faint"),
    "timeline": ("#/timeline/done", ".lanes rect"),
    "no timeline": ("#/timeline/failed", ".steps"),
    "cluster": ("#/cluster/done", ".graph"),
    "live cluster": ("#/cluster/live", "p.faint"),
    "logs": ("#/logs/failed", ".lines .trouble"),
    "no logs": ("#/logs/done", ".lines"),
}
"""Pages by name: the address, and what is there once the page is."""
SHOWN_AS = pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@SHOWN_AS
def test_pages_are_quiet_and_as_wide_as_the_screen(
    browser: Browser, address: str, size: tuple[int, int], scheme: str
) -> None:
    with visit(browser, size, scheme) as page:
        for name, (where, what) in PAGES.items():
            page.goto(f"{address}/{where}")
            expect(page.locator(what).first).to_be_visible()
            expect(page.locator("#live")).to_have_text("live")
            assert page.evaluate(OVERFLOW) <= 0, name
            assert page.evaluate("window.hacked") is None
            assert is_dark(page) == (scheme == "dark")


@SHOWN_AS
def test_a_report_is_quiet_where_it_lies(browser: Browser, place: Path, size: tuple[int, int], scheme: str) -> None:
    with visit(browser, size, scheme) as page:
        for run in ("done", "failed", "live", "seen"):
            page.goto(write_report(place / run, pngs=False).as_uri())
            expect(page.locator("#chart-reward canvas")).to_be_visible()
            assert page.evaluate(OVERFLOW) <= 0
            assert page.evaluate("window.hacked") is None
            assert is_dark(page) == (scheme == "dark")


def test_the_keys_of_a_page_are_shown_and_light_and_dark_are_kept(page: Page, address: str) -> None:
    page.goto(f"{address}/#/rollouts/done")
    expect(page.locator("pre.tokens")).to_be_visible()
    page.keyboard.press("?")
    keys = page.locator("#help kbd")
    expect(keys.first).to_be_visible()
    assert {"n", "p", "/", "g", "d", "?"} <= set(keys.all_inner_texts())
    page.keyboard.press("Escape")
    page.keyboard.press("d")
    assert is_dark(page)
    page.reload()
    expect(page.locator("pre.tokens")).to_be_visible()
    assert is_dark(page)
    page.keyboard.press("g")
    expect(page.locator("tr[data-run=done]")).to_be_visible()


def test_on_a_phone_the_table_of_runs_and_the_themes_of_a_run_need_little_room(browser: Browser, address: str) -> None:
    with visit(browser, PHONE) as page:
        page.goto(f"{address}/#/")
        expect(page.locator("tr[data-run='sweep/a'] td.number:visible")).to_have_text(
            ["10", "75.0%", "0.1"], use_inner_text=True
        )
        assert page.locator(".scroll").evaluate("(box) => box.scrollWidth - box.clientWidth") <= 0
        page.goto(f"{address}/#/run/done")
        expect(page.locator("#chart-reward canvas")).to_be_visible()
        assert page.locator(".themes").evaluate("(themes) => themes.clientHeight") < 50


def test_a_missing_run_is_told_with_a_way_back(page: Page, address: str) -> None:
    page.goto(f"{address}/#/nothing")
    expect(page.locator("tr[data-run=done]")).to_be_visible()
    page.goto(f"{address}/#/%")
    expect(page.locator("tr[data-run=done]")).to_be_visible()


def is_dark(page: Page) -> bool:
    red = page.evaluate("parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    return bool(red < 128)
