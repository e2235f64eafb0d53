"""The parts of the comparison with TRL that need no TRL: the task, its turns, and what is made of a round."""

import itertools
import random
import statistics

import pytest

from benchmarks.agents import against_trl, sums
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.toolbox import DescribedFunction
from penstock.workers.fresh_model import character_tokenizer

TOOLS = (DescribedFunction(sums.add).schema,)


@pytest.fixture(scope="module")
def tokenizer():
    made = character_tokenizer(sums.MODEL)
    made.chat_template = sums.CHAT_TEMPLATE
    return made


@pytest.mark.parametrize("num_growing", [0, 200])
def test_a_demonstration_asks_for_both_sums_and_then_says_the_answer(tokenizer, num_growing):
    form = TemplateFormat(tokenizer, "hermes")
    rows = list(itertools.islice(sums.demonstrations(0, num_growing), 300))
    assert (not any(row["said"].startswith(".") for row in rows[:6])) == bool(num_growing)
    for (a, b, c), *turns in zip(sums.problems(0), rows[::3], rows[1::3], rows[2::3], strict=False):
        assert turns[0]["messages"] == [{"role": "user", "content": f"x={a} y={b} z={c}"}]
        reads = [form.read(tokenizer(turn["said"])["input_ids"], TOOLS) for turn in turns]
        calls = [[dict(call.arguments) for call in read.calls] for read in reads]
        assert calls == [[{"a": a, "b": b}], [{"a": a + b, "b": c}], []]
        assert reads[-1].message["content"].lstrip(".") == str(a + b + c)


def test_the_template_writes_a_call_as_it_is_demonstrated(tokenizer):
    """Otherwise the sampled tokens of a turn would be no prefix of what the next one is asked with."""
    form = TemplateFormat(tokenizer, "hermes")
    first, second, _ = itertools.islice(sums.demonstrations(3), 3)
    said = tokenizer(first["said"])["input_ids"] + [tokenizer.eos_token_id]
    message = dict(form.read(said, TOOLS).message)
    result = second["messages"][-1]
    asked = form.prompt_ids([*first["messages"], message, result], TOOLS)
    assert asked == form.prompt_ids(second["messages"], ())
    before = form.prompt_ids(first["messages"], TOOLS)
    assert asked[: len(before) + len(said)] == before + said


def test_words_of_a_call_are_one_token_each(tokenizer):
    call = sums.written(12, 9)
    assert len(tokenizer(call)["input_ids"]) == 5
    assert tokenizer.decode(tokenizer(call)["input_ids"]) == call


def test_thoughts_are_geometric_with_their_mean():
    draws = random.Random(0)
    lengths = [len(sums.thoughts(draws)) for _ in range(20_000)]
    assert max(lengths) == sums.MOST_THOUGHTS
    assert statistics.mean(lengths) == pytest.approx(sums.THOUGHT, rel=0.05)
    assert sum(length == 0 for length in lengths) / len(lengths) == pytest.approx(1 / (sums.THOUGHT + 1), rel=0.1)


def test_a_round_becomes_means_of_an_attempt():
    answer = {"samples": 128, "seconds": 4.0, "turns": 384, "tokens": 12_800, "reward_mean": 0.5, "longest": 300}
    assert against_trl.row("trl", 2, answer) == {
        "part": "trl", "side": "trl", "round": 2, "per_s": 32.0, "turns": 3.0, "tokens": 100.0, "reward": 0.5,
        "samples": 128, "seconds": 4.0,
    }  # fmt: skip


def test_targets_are_ratios_of_the_medians():
    rates = {"trl": [10.0, 40.0, 20.0], "sync": [26.0, 25.0, 27.0], "async": [39.0, 39.0, 39.0]}
    rows = [{"part": "trl", "side": side, "per_s": rate} for side, some in rates.items() for rate in some]

    def median(rows, side):
        return statistics.median(row["per_s"] for row in rows if row["side"] == side)

    found = {target.target: (target.value, target.met) for target in against_trl.targets(rows, median)}
    assert found == {2.0: (1.95, False), 1.3: (1.3, True)}


def test_without_the_environment_of_trl_it_is_said_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(against_trl, "TRL_PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit, match="make bench-env"):
        against_trl.rounds(1, 1)
