"""The table of runs: sorted, filtered, picked from, live."""

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import visit
from tests.ui.made_runs import append
from tests.ui.pages.conftest import make_live

pytestmark = pytest.mark.real

ALL = {"done", "failed", "live", "seen", "sweep/a", "sweep/b", "sweep/c"}


def runs(page: Page) -> list[str]:
    return page.eval_on_selector_all("tbody tr[data-run]", "rows => rows.map((row) => row.dataset.run)")


def opened(page: Page, address: str) -> None:
    page.goto(f"{address}/#/")
    expect(page.locator("tr[data-run=done]")).to_be_visible()


def test_runs_are_sorted_by_any_column_with_the_unknown_last(page: Page, address: str) -> None:
    opened(page, address)
    assert set(runs(page)) == ALL
    page.get_by_role("button", name="Reward").click()
    assert runs(page) == ["sweep/c", "done", "sweep/b", "sweep/a", "live", "failed", "seen"]
    page.get_by_role("button", name="Reward").click()
    assert runs(page)[:2] == ["seen", "failed"]
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("Reward")
    page.get_by_role("button", name="Step", exact=True).click()
    assert runs(page)[0] == "done"


def test_runs_are_filtered_by_words_of_whatever_is_told_of_them(page: Page, address: str) -> None:
    opened(page, address)
    page.keyboard.press("/")
    page.keyboard.type("SWEEP fin")
    expect(page.locator("tbody tr")).to_have_count(3)
    page.locator("input[type=search]").fill("no room")  # what it failed with
    assert runs(page) == ["failed"]
    page.locator("input[type=search]").fill("0123abcd")  # its id
    assert runs(page) == ["done"]
    page.locator("input[type=search]").fill("nothing of the kind")
    expect(page.locator("tbody")).to_contain_text("No run matches.")


def test_runs_are_walked_through_picked_and_compared_by_keys_alone(page: Page, address: str) -> None:
    opened(page, address)
    page.keyboard.press("/")
    page.keyboard.type("sweep")
    page.keyboard.press("Escape")
    page.keyboard.press("c")  # nothing is picked yet
    assert page.url.endswith("#/")
    page.keyboard.press("a")
    expect(page.get_by_role("button", name="Compare 3")).to_be_enabled()
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_role("button", name="Compare 2")).to_be_enabled()
    page.keyboard.press("c")
    expect(page.locator("h1")).to_have_text("Comparison")
    page.go_back()
    page.keyboard.press("/")
    page.keyboard.type("done")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("done")


def test_the_table_shows_new_steps_and_runs_and_drops_removed_ones_unasked(
    browser: Browser, address: str, place: Path
) -> None:
    live = make_live(place / "live1")
    with visit(browser) as page, visit(browser) as other:
        for tab in (page, other):
            opened(tab, address)
            expect(tab.locator("tr[data-run=live1]")).to_contain_text("5 of 9")
        page.locator("tr[data-run=live1] input").focus()
        append(live / "metrics.jsonl", {"step": 6, "reward/mean": 0.5})
        make_live(place / "live2")
        for tab in (page, other):
            expect(tab.locator("tr[data-run=live1]")).to_contain_text("6 of 9")
            expect(tab.locator("tr[data-run=live2]")).to_be_visible()
        assert page.evaluate("document.activeElement.closest('tr').dataset.run") == "live1"
        shutil.rmtree(place / "live1")
        shutil.rmtree(place / "live2")
        for tab in (page, other):
            expect(tab.locator("tr[data-run=live1]")).to_have_count(0)


def test_of_thousands_of_runs_some_hundreds_are_shown_and_all_are_found(page: Page, address: str) -> None:
    opened(page, address)
    many = """async () => {
      const { RunsPage } = await import('/static/pages/runs.js');
      const names = [...Array(5000).keys()].map((index) => `run${index}`);
      const lines = new Map(names.map((name) => [name, {id: name, name}]));
      const shown = new RunsPage({ lines });
      const found = [shown.body.children.length, shown.count.textContent];
      shown.search.value = 'run4999';
      shown.filter();
      return [...found, shown.body.children.length, shown.count.textContent];
    }"""
    assert page.evaluate(many) == [
        300, "5000 of 5000 runs, the first 300 are shown", 1, "1 of 5000 runs"
    ]  # fmt: skip
