"""What the policy wrote: found by what it is, read token by token, and never run."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import until, visit
from tests.ui.made_runs import append, write_samples
from tests.ui.pages.conftest import HACK, make_live, sampled

pytestmark = pytest.mark.real

LINES = ".samples .line"


def opened(page: Page, address: str, query: str = "", run: str = "done") -> None:
    page.goto(f"{address}/#/rollouts/{run}{query}")
    expect(page.locator("pre.tokens span").first).to_be_visible()


def heading(page: Page) -> str:
    return page.locator(".sample h2").inner_text()


def test_the_group_with_the_lowest_reward_is_the_third(page: Page, address: str) -> None:
    opened(page, address)
    expect(page.locator(LINES)).to_have_count(8)
    page.get_by_label("sort").select_option("reward")
    page.get_by_title("largest or smallest first").click()
    expect(page.locator(LINES).first).to_contain_text("group 3")
    expect(page.locator(".sample h2")).to_have_text("step 20, group 3")
    expect(page.locator(".sample")).to_contain_text("The group: 2 attempts")
    assert page.locator(".sample td.number:first-child").all_inner_texts() == ["0.25", "0"]


def test_samples_are_filtered_by_what_they_are(page: Page, address: str) -> None:
    opened(page, address)
    page.locator("input[name=least_reward]").fill("0.6")
    page.keyboard.press("Enter")
    expect(page.locator(LINES)).to_have_count(5)
    page.locator("input[name=last_step]").fill("10")
    page.keyboard.press("Enter")
    expect(page.locator(LINES)).to_have_count(2)
    page.locator("input[name=last_step]").fill("")
    page.locator("input[name=least_reward]").fill("")
    page.keyboard.press("Enter")
    page.get_by_label("finish reason").select_option("length")
    expect(page.locator(LINES)).to_have_count(1)
    page.get_by_label("finish reason").select_option("")
    page.get_by_label("text").fill("QUESTION 2")
    page.keyboard.press("Enter")
    expect(page.locator(LINES)).to_have_count(2)


def test_a_filter_that_means_nothing_is_said_and_the_next_one_works(browser: Browser, address: str) -> None:
    with visit(browser, refusal=400) as page:
        opened(page, address, "?last_step=20")
        page.locator("input[name=group]").fill("2.5")
        page.keyboard.press("Enter")
        expect(page.locator("p.faint").first).to_contain_text("invalid literal")
        page.locator("input[name=group]").fill("3")
        page.keyboard.press("Enter")
        expect(page.locator(LINES)).to_have_count(2)


def test_samples_are_walked_through_by_keys(page: Page, address: str) -> None:
    opened(page, address)
    seen = [heading(page)]
    for key, expected in (("n", "n"), ("n", "n"), ("p", "p")):
        before = page.locator(f"{LINES}.at").get_attribute("data-place")
        page.keyboard.press(key)
        until(page, f"document.querySelector('{LINES}.at').dataset.place !== '{before}'")
        seen.append(page.locator(f"{LINES}.at").get_attribute("data-place") or expected)
    assert seen[1:] == ["1", "2", "1"]
    page.keyboard.press("/")
    page.keyboard.type("question 3")
    page.keyboard.press("Enter")
    expect(page.locator(LINES)).to_have_count(2)


def test_tokens_are_coloured_by_log_probability_advantage_and_version(page: Page, address: str) -> None:
    opened(page, address, "?group=2&sort=reward")  # the reward of 1 comes first
    tokens = page.locator("pre.tokens span")
    assert tokens.all_inner_texts() == ["two", " and", " two", " make"]

    def shades() -> list[str]:
        return [token.evaluate("(token) => token.style.background") for token in tokens.all()]

    strength = [float(shade.rstrip(")").split(",")[-1]) for shade in shades()]
    assert strength[2] > 5 * strength[1] > 5 * strength[0] * 0.9  # the unlikely one stands out
    assert "log p -3" in (tokens.nth(2).get_attribute("title") or "")
    page.get_by_label("colour of tokens").select_option("advantage")
    assert len(set(shades())) == 1
    assert "rgba(10, 159, 120" in shades()[0]  # green: made more likely
    assert "advantage 0.5" in (tokens.first.get_attribute("title") or "")
    page.get_by_label("colour of tokens").select_option("version")
    first, second, third, fourth = shades()
    assert (first == second, third == fourth, first == third) == (True, True, False)
    assert "version 9" in (tokens.nth(2).get_attribute("title") or "")


def test_the_colour_stays_from_sample_to_sample(page: Page, address: str) -> None:
    opened(page, address)
    page.get_by_label("colour of tokens").select_option("version")
    page.keyboard.press("n")
    expect(page.locator(f"{LINES}.at")).to_have_attribute("data-place", "1")
    expect(page.get_by_label("colour of tokens")).to_have_value("version")


def test_a_conversation_is_told_with_its_tools_and_its_turns(page: Page, address: str) -> None:
    opened(page, address, "?last_step=10")
    said = page.locator(".said")
    assert said.locator("b").all_inner_texts() == ["user", "assistant", "tool", "assistant"]
    expect(said.nth(1)).to_contain_text("I had better ask.")
    expect(said.nth(1).locator(".call")).to_have_text('add({"a":2,"b":2})')
    page.get_by_label("colour of tokens").select_option("turn")
    expect(page.locator("pre.tokens .turn")).to_have_count(2)
    titles = [token.get_attribute("title") or "" for token in page.locator("pre.tokens span:not(.turn)").all()]
    assert ["turn 1" in title for title in titles] == [True, True, False, False]


def test_each_turn_has_its_credit_whatever_the_order_of_its_tokens(page: Page, address: str) -> None:
    opened(page, address, "?last_step=10")
    said = page.locator(".said")
    told = [said.nth(place).locator(".credit").all_inner_texts() for place in range(4)]
    assert told == [[], ["credit 0.75 · reward 0"], [], ["credit -0.25 · reward 0.5"]]
    marks = page.locator("pre.tokens .turn").all_inner_texts()
    assert [mark.strip() for mark in marks] == ["¶ credit -0.25 · reward 0.5", "credit 0.75 · reward 0"]


@pytest.mark.parametrize("query", ["?group=1", "?last_step=10"])
def test_markup_and_terminal_escapes_are_shown_and_never_run(page: Page, address: str, query: str) -> None:
    opened(page, address, query)
    expect(page.locator(".sample pre.text", has_text="<script>window.hacked=1</script>").first).to_be_visible()
    assert HACK.replace("\x1b", "\x1b") in page.locator(".sample pre.text").all_inner_texts()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0


def test_new_samples_join_the_list_and_what_one_reads_stays(page: Page, address: str, place: Path) -> None:
    live = make_live(place / "writing")
    write_samples(live / "samples", 5, [sampled(7, 1.0), sampled(7, 0.5)])
    opened(page, address, run="writing")
    assert heading(page) == "step 5, group 7"
    page.locator(LINES).nth(1).click()
    expect(page.locator(f"{LINES}.at")).to_have_attribute("data-place", "1")
    write_samples(live / "samples", 6, [sampled(8, 1.0)])
    append(live / "metrics.jsonl", {"step": 6, "reward/mean": 0.5})
    expect(page.locator(LINES)).to_have_count(3)
    assert heading(page) == "step 5, group 7"
    expect(page.locator(f"{LINES}.at")).to_have_attribute("data-place", "1")


def test_a_sample_of_very_many_tokens_is_shown_in_part(page: Page, address: str, place: Path) -> None:
    live = make_live(place / "long")
    row = sampled(1, 1.0) | {"text": "x" * 300_000, "task": '{"prompt": "' + "y" * 300_000 + '"}'}
    many = 20_000
    row |= {"response_ids": [0] * many, "behavior_logprobs": [-1.0] * many, "token_versions": [1] * many}
    write_samples(live / "samples", 5, [row])
    opened(page, address, run="long")
    expect(page.locator("pre.tokens")).to_contain_text("and 11,808 more tokens")
    expect(page.locator("pre.text")).to_contain_text("and 200,000 more characters")


def test_pictures_stand_at_their_places_in_a_prompt(page: Page, address: str) -> None:
    opened(page, address, "?last_step=1", run="seen")
    prompt = page.locator(".sample pre.text").first
    expect(prompt.locator("img")).to_have_count(1)
    until(page, "document.querySelector('.sample pre.text img').naturalWidth === 56")
    assert prompt.inner_text() == "Here  and there [picture 2, which was not kept]: how many?"
    expect(prompt.locator("button.picture")).to_have_attribute("title", "picture 1: 56 × 84")


def test_pictures_of_turns_stand_at_their_places_in_the_conversation(page: Page, address: str) -> None:
    opened(page, address, "?first_step=2", run="seen")
    said = page.locator(".said")
    assert [one.locator("img").count() for one in said.all()] == [1, 0, 1, 0]
    expect(said.nth(2).locator("pre")).to_have_text(" And now?")
    until(page, "document.querySelectorAll('.said img')[1].naturalWidth === 900")
    box = said.nth(2).locator("img").bounding_box()
    assert box is not None
    assert box["width"] <= 260
    assert box["height"] <= 170


def test_a_click_shows_a_picture_in_full_size_and_another_one_closes_it(page: Page, address: str) -> None:
    opened(page, address, "?first_step=2", run="seen")
    pictures, large = page.locator(".said button.picture"), page.locator("dialog.enlarged")
    for number, width, told in (
        (1, 900, "picture 2: 900 × 600"),
        (0, 5 * 56, "picture 1: 56 × 84, 5 times as large"),
    ):
        pictures.nth(number).click()
        expect(large.locator("p")).to_have_text(told)
        box = large.locator("img").bounding_box()
        assert box is not None
        assert round(box["width"]) == width
        if number:
            large.locator("img").click()
        else:
            page.keyboard.press("Escape")
        expect(large).to_have_count(0)


def test_a_picture_that_is_gone_is_told(browser: Browser, address: str, place: Path) -> None:
    live = make_live(place / "gone")
    task = json.dumps({"prompt": "<image>How many?"})
    write_samples(live / "samples", 5, [sampled(7, 1.0) | {"task": task, "pictures": ["0" * 32 + ".png"]}])
    with visit(browser, refusal=404) as page:
        opened(page, address, run="gone")
        expect(page.locator(".sample pre.text").first).to_have_text("[picture 1, which was not kept]How many?")
