"""The rewards that come with Penstock."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.conf.errors import DataError
from penstock.workers.problems import Problems
from penstock.workers.reward.functions import digits, label, math_verify, reasoning_gym, ungrouped
from tests.amounts import amount

GSM8K = Path(__file__).parents[3] / ".." / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("She has 10 + 8 = 18 clips.\n#### 18", "Add them.\n#### 18", 1.0),
        ("The answer is 18.", "#### 18", 1.0),
        ("The answer is \\boxed{18}", "#### 18", 1.0),
        ("so $\\frac{36}{2}$", "#### 18", 1.0),
        ("#### 1,800", "#### 1800", 1.0),
        ("#### $1800.", "#### 1,800", 1.0),
        ("it is 17", "#### 18", 0.0),
        ("#### 18\n#### 17", "#### 18", 0.0),
        ("I do not know", "#### 18", 0.0),
        ("", "#### 18", 0.0),
        ("18\n#### ", "#### 18", 0.0),
        ("$x = 3$", "$3$", 1.0),
        ("0.5", "\\frac{1}{2}", 1.0),
        ("-4", "-4", 1.0),
        ("7", 7, 1.0),
    ],
)
def test_math_verify_compares_final_answers(response, answer, reward):
    assert math_verify(response, answer) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("#### 1,2", "1,2", 1.0),
        ("#### 12", "1,2", 0.0),
        ("#### 1.2", "1,2", 0.0),
        ("#### 1,2", "12", 0.0),
        ("#### 1,2", "1.2", 0.0),
        ("#### 2", "1,2", 0.0),
        ("#### 1,2", "2", 0.0),
        ("$1,2$", "1,2", 1.0),
        ("#### 2, 1", "1,2", 1.0),
        ("#### 1 and 2", "1,2", 1.0),
        ("#### 3", "2 and 3", 0.0),
        ("#### (1,2)", "#### (12)", 0.0),
        ("#### (12)", "#### (1,2)", 0.0),
        ("#### 12", "#### (12)", 1.0),
        ("#### (1, 2)", "(1,2)", 1.0),
        ("The point is (1, 2).", "(1,2)", 1.0),
        ("The answer is (1, 2).", "2", 0.0),
        ("\\boxed{(1,2)}", "(1,2)", 1.0),
        ("#### (2,1)", "(1,2)", 0.0),
        ("#### {3, 2, 1}", "{1,2,3}", 1.0),
        ("#### [0, 1)", "[0,1)", 1.0),
        ("#### (0, 1)", "[0,1)", 0.0),
        ("#### (-\\infty, 3]", "(-\\infty,3]", 1.0),
        ("#### (-1, -2)", "(-1,-2)", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -1,234.5", "-1234.5", 1.0),
        ("#### 1,234,567", "1234567", 1.0),
        ("#### 1, 234", "1234", 0.0),
        ("#### 1,234,5", "12345", 0.0),
        ("#### 12,34", "1234", 0.0),
        ("#### 1234,567", "1234567", 0.0),
        ("#### 0,123", "123", 0.0),
        ("#### (1,234, 5)", "(1234, 5)", 1.0),
        ("#### (1,234, 5)", "(12345)", 0.0),
        ("#### (1,234,5)", "(1, 234, 5)", 1.0),
        ("#### (1,234)", "(1, 234)", 1.0),
        ("#### {1,234}", "1234", 0.0),
        ("#### $1,000$", "1000", 1.0),
        ("#### 1{,}000", "1000", 1.0),
        ("#### 10,\\!000", "10000", 1.0),
        ("#### 10\\,000", "10000", 1.0),
        ("#### \\frac{1,234}{5}", "246.8", 1.0),
        ("#### 1,000 dollars", "1000", 1.0),
        ("#### $1,000.50", "1000.5", 1.0),
        ("#### 1 234", "1,234", 1.0),
        ("#### 1 2", "12", 0.0),
        ("#### 34/7", "3 4/7", 0.0),
        ("#### x=1,y=2", "x = 1, y = 2", 1.0),
        (r"\[1,234\]", "1234", 1.0),
        (r"Hence \[1,234,567\]", "1234567", 1.0),
        (r"Hence \(1,234,567\)", "1234567", 1.0),
        (r"\[(1,2)\]", "(1,2)", 1.0),
        (r"\[(1,234)\]", "(1, 234)", 1.0),
        (r"\[1,2\]", "1, 2", 1.0),
        ("1234", r"\[1,234\]", 1.0),
        ("He paid (in all 1,234 dollars)", "1234", 1.0),
        ("He paid (in all 1,234 dollars)", "(1, 234)", 0.0),
        (r"#### $\frac{1}{2}$, 3", "1/2, 3", 1.0),
        ("#### $1$ and $2$", "1, 2", 1.0),
        ("#### $1$, $2$", "2", 0.0),
        (r"#### \{1,234\}", "{1, 234}", 1.0),
    ],
)
def test_math_verify_takes_a_comma_for_thousands_only_between_thousands(response, answer, reward):
    assert math_verify(response, answer) == reward


def test_thousands_are_found_in_a_time_that_grows_with_the_text_alone():
    started = time.perf_counter()
    assert ungrouped("{1,234}" * 10_000) == "{1,234}" + "{1234}" * 9_999
    assert time.perf_counter() - started < 5


NUMBERS = st.integers(-(10**7), 10**7)


@settings(max_examples=amount(30), deadline=None)
@given(NUMBERS, st.sampled_from(["#### {}", "It is {}.", "\\boxed{{{}}}", "${}$"]))
def test_thousands_are_read_with_and_without_separators(number, form):
    assert math_verify(form.format(f"{number:,}"), str(number)) == 1.0
    assert math_verify(form.format(number), f"{number:,}") == 1.0


@settings(max_examples=amount(30), deadline=None)
@given(st.lists(NUMBERS, min_size=2, max_size=4, unique=True), st.sampled_from(["{}", "({})", "{{{}}}"]))
def test_a_list_is_right_about_itself_and_no_number(numbers, form):
    answer = form.format(", ".join(map(str, numbers)))
    assert math_verify(f"#### {answer}", answer) == 1.0
    assert math_verify("#### " + "".join(map(str, numbers)), answer) == 0.0
    assert math_verify(f"#### {answer}", str(numbers[-1])) == 0.0


def test_math_verify_says_when_the_reference_answer_cannot_be_read():
    with pytest.raises(ValueError, match="reference answer ''"):
        math_verify("18", "#### ")


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"GSM8K is not at {GSM8K}")
def test_every_gsm8k_solution_is_right_with_its_own_number_and_no_other():
    rows = [json.loads(line) for line in GSM8K.open()][:300]
    for row in rows:
        assert math_verify(row["answer"], row["answer"]) == 1.0
        final = row["answer"].split("####")[1].strip().replace(",", "")
        assert math_verify(f"The answer is {final}.", row["answer"]) == 1.0
        assert math_verify(f"The answer is {float(final) + 1:g}.", row["answer"]) == 0.0


def test_reasoning_gym_scores_with_the_problems_own_verifier():
    problems = Problems("chain_sum", {"max_terms": 2, "max_digits": 1}, seed=0, size=5)
    entry = problems.entry(0)
    task = json.loads(json.dumps({"prompt": entry["question"], **problems.extra(entry)}))
    assert reasoning_gym(f"  {entry['answer']}\n", task) == 1.0
    assert reasoning_gym("12345678", task) < 1.0
    assert reasoning_gym("", task) == 0.0


def test_strict_gives_no_partial_credit():
    problems = Problems("chain_sum", {"max_terms": 2}, seed=0, size=5)
    entry = problems.entry(0)
    task = problems.extra(entry)
    wordy = f"it is {entry['answer']}"
    assert 0.0 < reasoning_gym(wordy, task) < 1.0
    assert reasoning_gym(wordy, task, strict=True) == 0.0
    assert reasoning_gym(entry["answer"], task, strict=True) == 1.0


def test_reasoning_gym_refuses_rows_of_other_sources():
    with pytest.raises(DataError, match=r"data\.source=reasoning_gym"):
        reasoning_gym("4", {"prompt": "2+2", "answer": "4"})


def test_a_label_is_the_number_that_the_dataset_has():
    assert label("any", {"label": True}) == 1.0
    assert label("any", {"thumbs": -1}, column="thumbs") == -1.0
    with pytest.raises(ValueError, match=r"column 'label' holds NoneType None, where a number or bool is due"):
        label("any", {"thumbs": 1})


def test_digits_is_the_share_of_digits():
    assert digits("a1b2") == 0.5
    assert digits("") == 0.0
    assert digits("²³") == 0.0
