"""Procedural problems: the same ones for the same seed, held-out ones left out, verifiers that work from JSON."""

import json

import pytest

from penstock.conf.errors import ConfigError, DataError
from penstock.workers.problems import Problems, from_json, make_dataset, to_json, verify

EASY = {"max_terms": 2, "max_digits": 1}


def questions(problems):
    return [problems.entry(index)["question"] for index in range(len(problems))]


def test_same_arguments_make_the_same_problems_and_another_seed_others():
    one, same, other = (Problems("chain_sum", seed=seed, size=20) for seed in (3, 3, 4_000))
    assert questions(one) == questions(same)
    assert questions(one) != questions(other)


def test_no_held_out_question_is_trained_on():
    held_out = Problems("chain_sum", EASY, seed=1_000_003, size=60)
    train = Problems("chain_sum", EASY, seed=0, size=500, exclude=held_out.questions())
    plain = Problems("chain_sum", EASY, seed=0, size=500)
    assert set(questions(plain)) & held_out.questions()
    assert not set(questions(train)) & held_out.questions()
    kept = [q for q in questions(plain) if q not in held_out.questions()]
    assert [q for q, p in zip(questions(train), questions(plain), strict=True) if q == p] == kept


def test_a_task_with_nothing_left_to_train_on_says_what_to_change():
    exclude = Problems("chain_sum", EASY, seed=0, size=3000).questions()
    train = Problems("chain_sum", EASY, seed=0, size=1, exclude=exclude)
    with pytest.raises(DataError, match=r"too few different problems.*evaluation\.num_problems"):
        train.entry(0)


@pytest.mark.parametrize("task", ["chain_sum", "arc_agi", "spell_backward", "countdown"])
def test_verifiers_give_full_marks_to_the_answer_after_a_trip_through_json(task):
    problems = Problems(task, seed=5, size=4)
    entry = problems.entry(2)
    row = json.loads(json.dumps({"prompt": entry["question"], **problems.extra(entry)}))
    assert verify(str(entry["answer"]), row) == problems.dataset.score_answer(entry["answer"], entry) == 1.0


def test_tuples_survive_json():
    value = {"a": [(1, 2), {"b": ()}], "c": "text"}
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sums", {}, r"data\.path=chain_sums.*did you mean 'chain_sum'"),
        ("chain_sum", {"max_digit": 2}, r"data\.options\.max_digit: .*did you mean 'max_digits'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, r"data\.options=.*max_terms must be >= min_terms"),
    ],
)
def test_wrong_tasks_and_options_are_named(task, options, message):
    with pytest.raises(ConfigError, match=message):
        make_dataset(task, options)
