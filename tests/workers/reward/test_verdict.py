"""How a judge's answer is read."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.reward.judge import Rubric, verdict


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("8", 8.0),
        ("**8**", 8.0),
        ("8.5.", 8.5),
        ("8/10", 8.0),
        ("**8**/10", 8.0),
        ("8 / 10", 8.0),
        ("7 out of 10", 7.0),
        ("7.5 out of 10 points", 7.5),
        ("3 (0-10 scale)", 3.0),
        ("3 (on a scale from 0 to 10)", 3.0),
        ("On a scale of 0 to 10, I give it a 6.", 6.0),
        ("On a scale of 10 this is 6", 6.0),
        ("[0, 10]: 4", 4.0),
        ("Score: 7", 7.0),
        ("Score (0–10): 7", 7.0),
        ("Final score (out of 10): **7**", 7.0),
        ("Score: 7. It has 2 errors.", 7.0),
        ("It has 2 errors.\nRating: 7/10", 7.0),
        ("1. Right: 9\n2. Polite: 3\n\nOverall score: 6", 6.0),
        ("There are 2 errors in 3 lines.\n\n**6**", 6.0),
        ("6\n\n**6**", 6.0),
        ("6\nof 10", 6.0),
        ("I would say 8.5", 8.5),
        ("10", 10.0),
        ("10/10", 10.0),
        ("0/10", 0.0),
        ('```json\n{"score": 7, "most": 10}\n```', 7.0),
        ('Here you are: {"score": 7}', 7.0),
        ('{"score": "8/10"}', 8.0),
        ('{"score": "8"}', 8.0),
        ('{"reason": "2 errors in 3 lines", "score": 4}', 4.0),
        ('{"rating": 7}', 7.0),
        ("<think>It could be 3, or 9/10.</think>\n5", 5.0),
        ("GPT4 would give 7", 7.0),
        ("Score: 3. No: score 4.5", 4.5),
        ("Score: 6 (max score: 10)", 6.0),
        ("Score: 6. Maximum score: 10", 6.0),
        ("Maximum possible score is 10. Score: 6", 6.0),
        ("Score (of 10): 6", 6.0),
        ('```json\n{"score": 4, "reason": "a score of 9 needs tests"}\n```', 4.0),
        ('{"score": 7, "reason": "I first thought a score of 9"}\n\nHope this helps!', 7.0),
        ('Of {"a": [} I say {"score": 3, "of": {"score": 9}}. No: {"score": "4/10"}', 4.0),
        ('{"score": 4,\n "reason": "two\nlines, and a score of 9"}', 4.0),
        ("7/10 for both, so 7 / 10.", 7.0),
        ("Style 7/10, sense 9/10. Score: 8/10", 8.0),
    ],
)
def test_the_score_of_an_answer_on_a_scale_from_0_to_10(text: str, score: float) -> None:
    assert verdict(text, 0, 10) == score


@pytest.mark.parametrize(
    "text",
    [
        "great!",
        "11",
        "11/10",
        "-1",
        "4/5",
        "7-8",
        "Score: 7-8",
        "Score: 7 to 8",
        "80%",
        "Score: 80%",
        "7. There are 2 errors.",
        "7/10. If fixed, 9/10.",
        "3\n8",
        "**8**\n\n10",
        "3, 5, 8",
        '{"score": true} is what I say',
        "0-10",
        "7,5",
        "true",
        "null",
        "NaN",
        "Infinity",
        '{"score": true}',
        '{"score": null}',
        '{"score": NaN}',
        '{"score": "great"}',
        '{"score": "4/5"}',
        "7th",
        "<think>Maybe 3",
        "9" * 400,
    ],
)
def test_no_verdict_is_made_up_on_a_scale_from_0_to_10(text: str) -> None:
    with pytest.raises(ValueError, match="the judge has said"):
        verdict(text, 0, 10)


@pytest.mark.parametrize(
    ("text", "low", "high", "score"),
    [
        ("-1", -1, 1, -1.0),
        ("Score: -0.5 (-1 to 1)", -1, 1, -0.5),
        ("80%", 0, 1, 0.8),
        ("80%", 0, 100, 80.0),
        ("80/100", 0, 100, 80.0),
        ("80 percent", 0, 100, 80.0),
        ("1,250", 0, 2000, 1250.0),
        ("4/5", 1, 5, 4.0),
        ("4 (1 = worst, 5 = best)", 1, 5, 4.0),
        ("0.25", 0, 1, 0.25),
        (".25", 0, 1, 0.25),
    ],
)
def test_the_score_of_an_answer_on_other_scales(text: str, low: float, high: float, score: float) -> None:
    assert verdict(text, low, high) == score


SCORES = st.integers(0, 10) | st.floats(0, 10).map(lambda number: round(number, 2))


@given(
    SCORES,
    st.sampled_from(["{}", "{}/10", "{} out of 10", "{} (0-10 scale)", "Score: {}", "**{}**", "Score: **{}/10**"]),
)
def test_a_score_is_read_however_its_scale_is_told(score: float, form: str) -> None:
    assert verdict(form.format(score), 0, 10) == score
    assert Rubric().score(json.dumps({"score": form.format(score)})) == score / 10


@given(st.text(max_size=60) | st.text("0123456789.,/-% scoreut()\n", max_size=30))
def test_whatever_a_judge_says_is_a_score_in_the_range_or_an_error(text: str) -> None:
    with suppress(ValueError):
        assert 0 <= verdict(text, 0, 10) <= 10
