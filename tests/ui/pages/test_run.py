"""The page of one run: what it says, its charts, and how it goes on while one looks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import until, visit
from tests.ui.made_runs import append, make_run, steps
from tests.ui.pages.conftest import NUM_STEPS, make_live

pytestmark = pytest.mark.real

REWARD = "document.querySelector('#chart-reward').chart"


def chart(page: Page, name: str = "reward") -> Any:
    """What the chart shows: data of its curves, scale of its x axis."""
    return page.locator(f"#chart-{name}").evaluate(
        "({chart}) => ({x: [chart.plot.scales.x.min, chart.plot.scales.x.max], steps: chart.plot.data[0],"
        " data: chart.plot.data.slice(1), labels: chart.plot.series.slice(1).map((one) => one.label)})"
    )


def opened(page: Page, address: str, run: str = "done") -> None:
    page.goto(f"{address}/#/run/{run}")
    expect(page.locator("#chart-reward canvas")).to_be_visible()


@pytest.mark.promise("Quick start")
def test_a_run_says_how_it_stands_and_what_is_wrong_with_it(page: Page, address: str) -> None:
    opened(page, address)
    expect(page.locator("h1")).to_have_text("done")
    expect(page.locator("h1 + p")).to_contain_text("id 0123abcd")
    cards = dict(
        zip(page.locator(".card span").all_inner_texts(), page.locator(".card b").all_inner_texts(), strict=True)
    )
    assert cards["Step"] == f"{NUM_STEPS} of 9"
    assert (cards["Held-out accuracy"], cards["Mean reward"], cards["Wall time"]) == ("75.0%", "0.025 → 0.385", "1:20")
    expect(page.locator(".notice.warning")).to_have_text("step 20: entropy fell. Lower the learning rate")
    expect(page.locator(".events")).to_contain_text("member=Rollout-1")
    expect(page.locator("body")).to_contain_text("sums of two numbers")
    page.goto(f"{address}/#/run/failed")
    expect(page.locator(".state.failed")).to_be_visible()
    expect(page.locator(".notice").first).to_have_text("no room")


def test_a_chart_has_the_numbers_of_the_run_and_the_range_of_its_samples(page: Page, address: str) -> None:
    opened(page, address)
    found = chart(page)
    assert found["labels"] == ["mean high", "mean low", "mean"]
    assert found["steps"] == list(range(1, NUM_STEPS + 1))
    high, low, mean = (values[9] for values in found["data"])
    assert (high, low, mean) == pytest.approx((0.2, 0.0, 0.1))
    expect(page.locator("#chart-reward .legend")).to_contain_text("mean 0.4")


def test_a_drag_zooms_all_charts_and_a_double_click_shows_the_whole_run_again(page: Page, address: str) -> None:
    opened(page, address)
    expect(page.locator("#chart-accuracy canvas")).to_be_visible()
    over = page.locator("#chart-reward .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=4)
    page.mouse.up()
    until(page, f"{REWARD}.plot.data[0].length < 20")
    assert 9 <= chart(page)["steps"][0] <= chart(page)["steps"][-1] <= 22
    assert page.locator("#chart-entropy").evaluate("({chart}) => chart.range[0]") > 5
    expect(page.get_by_role("button", name="Whole run")).to_be_enabled()
    over.dblclick()
    until(page, f"{REWARD}.plot.data[0].length === {NUM_STEPS}")
    expect(page.get_by_role("button", name="Whole run")).to_be_disabled()


def test_smoothing_keeps_the_curve_itself_and_draws_a_smoother_one(page: Page, address: str) -> None:
    opened(page, address)
    page.get_by_label("smoothing").fill("0.9")
    found = chart(page)
    assert found["labels"][-2:] == ["mean raw", "mean"]
    raw, smooth = found["data"][-2:]
    assert raw[-1] == pytest.approx(0.4)
    assert (smooth[0], smooth[1]) == pytest.approx((0.01, 0.01 * 0.9 / 1.9 + 0.02 / 1.9))
    assert smooth[-1] < raw[-1]


def test_a_curve_is_hidden_by_its_legend_and_a_closed_theme_loads_once_opened(page: Page, address: str) -> None:
    opened(page, address)
    page.locator("#chart-reward .legend button").click()
    expect(page.locator("#chart-reward .legend button.hidden")).to_be_visible()
    assert page.locator("#chart-reward").evaluate("({chart}) => chart.plot.series.at(-1).show") is False
    page.locator(".themes a", has_text="store").click()
    expect(page.locator("[data-theme=store] canvas").first).to_be_visible()


def test_new_steps_warnings_and_the_end_of_a_run_appear_without_a_reload(page: Page, address: str, place: Path) -> None:
    live = make_live(place / "growing")
    opened(page, address, "growing")
    page.evaluate("window.kept = 1")
    append(live / "metrics.jsonl", {"step": 6, "reward/mean": 0.9, "accuracy/heldout": 0.5})
    append(live / "events.jsonl", {"time": "2026-01-01T00:00:30.000Z", "kind": "hint", "rule": "idle", "step": 6,
                                   "text": "engines wait", "advice": "Let them overlap"})  # fmt: skip
    expect(page.locator(".cards")).to_contain_text("6 of 9")
    expect(page.locator(".notice.hint")).to_contain_text("engines wait")
    expect(page.locator("#chart-reward .legend")).to_contain_text("0.9")
    expect(page.locator("#chart-accuracy .legend")).to_contain_text("50.0%")
    append(live / "events.jsonl", {"time": "2026-01-01T00:00:31.000Z", "kind": "end"})
    expect(page.locator(".state.finished")).to_be_visible()
    assert page.evaluate("window.kept") == 1


def test_zoom_and_smoothing_stay_while_a_run_goes_on(page: Page, address: str, place: Path) -> None:
    live = make_live(place / "watched")
    opened(page, address, "watched")
    page.get_by_label("smoothing").fill("0.5")
    zoom = "new CustomEvent('zoom', {bubbles: true, detail: [2, 4]})"
    page.evaluate(f"document.querySelector('#chart-reward').dispatchEvent({zoom})")
    until(page, f"{REWARD}.plot.data[0].length === 3")
    append(live / "metrics.jsonl", {"step": 6, "reward/mean": 0.9, "never/seen": 1.0})
    expect(page.locator(".cards")).to_contain_text("6 of 9")
    expect(page.locator("[data-theme=others]")).to_have_count(1)  # a chart more
    until(page, f"{REWARD}.plot?.data[0].length === 3")
    assert chart(page)["labels"][-1] == "mean"
    assert "mean raw" in chart(page)["labels"]


def test_a_run_that_is_removed_while_one_looks_is_told_and_what_was_shown_stays(
    browser: Browser, address: str, place: Path
) -> None:
    live = make_live(place / "removed")
    with visit(browser, refusal=404) as page:
        opened(page, address, "removed")
        shutil.rmtree(live)
        expect(page.get_by_role("alert")).to_contain_text("There is no run 'removed'")
        expect(page.locator("#chart-reward canvas")).to_be_visible()


@pytest.mark.parametrize("count", [0, 1])
def test_a_run_of_no_step_or_one_is_a_page_too(page: Page, address: str, place: Path, count: int) -> None:
    make_run(place / f"short{count}", "start", metrics=steps(count))
    page.goto(f"{address}/#/run/short{count}")
    expect(page.locator("h1")).to_have_text(f"short{count}")
    expect(page.locator(".cards")).to_contain_text("1 of 9" if count else "– of 9")
    expect(page.locator("canvas")).to_have_count(2 if count else 0)


def test_texts_without_an_end_and_markup_in_a_run_break_nothing(page: Page, address: str, place: Path) -> None:
    odd = "<b>x</b>" + "y" * 20_000
    run = make_run(place / "odd", "start", metrics=steps(3), config=f"description: '{odd}'\nmade: {{deep: '{odd}'}}\n")
    append(run / "events.jsonl", {"time": 5, "kind": odd, "text": [{"a": odd}], "rule": None})
    append(run / "events.jsonl", {"time": None, "kind": "failed", "message": odd})
    page.goto(f"{address}/#/run/odd")
    expect(page.locator(".state.failed")).to_be_visible()
    assert page.locator("main b", has_text="x").filter(has_not_text="<").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_two_pages_share_the_server_and_one_that_is_hidden_hears_nothing(browser: Browser, address: str) -> None:
    """Each page in view takes one of the six connections that a browser has to a server."""
    with visit(browser) as page:
        opened(page, address)
        expect(page.locator("#live")).to_have_text("live")
        state = """(hidden) => {
          Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
          document.dispatchEvent(new Event('visibilitychange'));
        }"""
        page.evaluate(state, True)
        with page.expect_request("**/api/live"):
            page.evaluate(state, False)
        expect(page.locator("#live")).to_have_text("live")
