"""What the actors of a run printed."""

import pytest
from playwright.sync_api import Page, expect

from tests.ui.pages.conftest import HACK

pytestmark = pytest.mark.real

LINES = ".lines .line"


def test_what_the_run_failed_with_comes_first_and_lines_by_time(page: Page, address: str) -> None:
    page.goto(f"{address}/#/logs/failed")
    expect(page.locator(".notice").first).to_contain_text("failed: no room")
    expect(page.locator(f"{LINES} b")).to_have_text(["Rollout-1", "Trainer-policy-0", "Rollout-1"])
    expect(page.locator(f"{LINES}.trouble span")).to_have_text("RuntimeError: out of memory")


def test_lines_are_chosen_by_actor_by_text_and_by_trouble(page: Page, address: str) -> None:
    page.goto(f"{address}/#/logs/failed")
    expect(page.locator(LINES)).to_have_count(3)
    page.get_by_label("actor").select_option("Trainer-policy-0")
    expect(page.locator(f"{LINES} span")).to_have_text(["step 4"])
    page.get_by_label("actor").select_option("")
    page.keyboard.press("Escape")
    page.locator("body").click(position={"x": 5, "y": 5})
    page.keyboard.press("/")
    page.keyboard.type("MEMORY")
    expect(page.locator(LINES)).to_have_count(1)
    page.get_by_label("text").fill("")
    expect(page.locator(LINES)).to_have_count(3)
    page.get_by_label("errors only").check()
    expect(page.locator(LINES)).to_have_count(1)


def test_what_was_printed_is_shown_and_never_run(page: Page, address: str) -> None:
    page.goto(f"{address}/#/logs/failed")
    shown = page.locator(f"{LINES} span").first
    expect(shown).to_contain_text(HACK.split("\x1b")[0])
    assert page.evaluate("window.hacked") is None


def test_a_run_whose_actors_printed_nothing_says_so(page: Page, address: str) -> None:
    page.goto(f"{address}/#/logs/live")
    expect(page.get_by_role("status").last).to_have_text("No actor has printed anything yet.")
