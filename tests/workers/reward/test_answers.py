r"""Answers in the forms in which people and models write them."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.reward.functions import last_box, math_verify
from tests.amounts import amount

MATH500 = Path(__file__).parents[3] / ".." / "shared" / "data" / "math500" / "answers.txt"
FORMS = (
    r"4\sqrt{5}", r"2^{10}", r"12\pi", "y=2x+1", "10!", "3:4", r"1\frac45", r"137 \frac{1}{2}", r"3 \pm 2\sqrt{2}",
    r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\frac 59", "6 - 5i", r"(0,9)\cup(9,36)", r"\text{Evelyn}",
    r"\left( 3, \frac{\pi}{2} \right)", "52_8", "x^5 - x^4 + 1", r"\text{(C)}", r"\{1\pm\sqrt{5},-2\}", "1,-2", "p - q",
    r"11,\! 111,\! 111,\! 100", r"x \in [-2,7]", "6:00", r"90^\circ", r"\$36", r"864 \mbox{ inches}^2",
)  # fmt: skip
SAME_NUMBER = ("^\\circ", "\\mbox", "x=", "$", "text{ c")
"""Marks of answers whose number alone is as good."""


def assert_read(answer: str) -> None:
    """Assert that an answer is right in every place for answers, and that a number within it is not."""
    for form in (r"\boxed{%s}", r"So the answer is $\boxed{%s}$.", "It follows.\n#### %s", "%s"):
        assert math_verify(form % answer, answer) == 1.0, form
    number = re.search(r"\d+", answer)
    if number and number[0] != answer.strip() and not any(mark in answer for mark in SAME_NUMBER):
        assert math_verify(rf"\boxed{{{number[0]}}}", answer) == 0.0
        assert math_verify(f"#### {answer}", number[0]) == 0.0


@pytest.mark.parametrize("answer", FORMS)
def test_a_formula_is_right_about_itself_and_no_number_in_it(answer: str) -> None:
    assert_read(answer)


@pytest.mark.skipif(not MATH500.is_file(), reason=f"the answers of MATH-500 are not at {MATH500}")
def test_every_answer_of_math_500_is_read() -> None:
    for answer in MATH500.read_text().splitlines():
        assert_read(answer)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"\boxed{50\%}", r"50\%", 1.0),
        (r"\boxed{50\%}", "50%", 1.0),
        (r"\boxed{50%}", r"50\%", 1.0),
        (r"\boxed{5\text{ cm}}", "5", 1.0),
        (r"\boxed{5 cm}", "5", 1.0),
        (r"\boxed{−5}", "-5", 1.0),
        (r"\boxed{2×3}", "6", 1.0),
        (r"\boxed{2√5}", r"2\sqrt{5}", 1.0),
        (r"\boxed{½}", "0.5", 1.0),
        (r"\boxed{2½}", "2.5", 1.0),
        (r"\boxed{[0,∞)}", r"[0,\infty)", 1.0),
        (r"\boxed{１２}", "12", 1.0),
        (r"\boxed{3e-4}", "0.0003", 1.0),
        (r"\boxed{2.5×10^3}", "2500", 1.0),
        (r"\boxed{10^-2}", "0.01", 1.0),
        ("#### 3x²", "3x^2", 1.0),
        (r"\fbox{7}", "7", 1.0),
        (r"\framebox{7}", "8", 0.0),
        (r"\boxed{12\pi}", "12", 0.0),
        (r"\boxed{4}", r"4\sqrt{5}", 0.0),
        (r"first \boxed{1}, no: \boxed{2}", "2", 1.0),
        (r"\boxed{1} and \boxed{2}", "1, 2", 1.0),
        (r"it is \boxed{1", "1", 0.0),  # cut
        (r"\boxed{ 52_8 }", "52_{8}", 1.0),
        (r"\boxed{52}", "52_8", 0.0),
        (r"\boxed{0.0000001}", "0.0000002", 0.0),
        (r"\boxed{0.0000001}", r"2\cdot10^{-7}", 0.0),
        (r"\boxed{10000001}", "10000000", 0.0),
        (r"\boxed{3.14}", "3.140000001", 1.0),
        (r"\boxed{0.50}", "0.5", 1.0),
        (r"\boxed{}", "5", 0.0),
        (r"\boxed{10^{400}}", r"10^{400}", 1.0),
        (r"\boxed{10^{399}}", r"10^{400}", 0.0),
        (r"\boxed{0}", "0.0", 1.0),
    ],
)
def test_other_notations_mean_the_same(response: str, answer: str, reward: float) -> None:
    assert math_verify(response, answer) == reward


@settings(max_examples=amount(100), deadline=None)
@given(st.text(r"\boxed{}fb 1,$and", max_size=60))
def test_a_box_is_found_or_not_in_any_text(text: str) -> None:
    found = last_box(text)
    assert found is None or all(part in text for part in found.split(", ") if part)
    assert last_box(text + r"\boxed{9{8}}").endswith("9{8}")


@settings(max_examples=amount(100), deadline=None)
@given(
    st.integers(2, 99), st.integers(2, 99), st.sampled_from([r"%d\sqrt{%d}", "%d^{%d}", r"%d\pi+%d", "%dx+%d", "%d:%d"])
)
def test_formulas_of_numbers_are_not_their_numbers(first: int, second: int, form: str) -> None:
    answer = form % (first, second)
    assert math_verify(rf"\boxed{{{answer}}}", answer) == 1.0
    assert math_verify(rf"\boxed{{{first}}}", answer) == 0.0
