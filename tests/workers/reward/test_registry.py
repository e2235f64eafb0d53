"""Where reward functions are found, and how a wrong name fails."""

import pickle

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.reward.reward_registry import REWARDS, RewardSpec, find_reward, reward
from penstock.workers.user_code import InlineValue


def test_registered_name_is_found():
    assert find_reward("digits")("a1") == 0.5


def test_file_and_function_are_found(tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, task):\n    return 3.0\n")
    assert find_reward(f"{tmp_path}/mine.py:score")("x", {}) == 3.0


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 4.0\n")
    (tmp_path / "mine.py").write_text(
        "from helper_of_mine import VALUE\ndef score(response, task):\n    return VALUE\n"
    )
    assert find_reward(f"{tmp_path}/mine.py:score")("x", {}) == 4.0


def test_module_and_function_are_found():
    assert find_reward("penstock.workers.reward.functions:digits")("11") == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math_verfy", "did you mean 'math_verify'"),
        ("no.such.module:f", r"no\.such\.module.*cannot be imported"),
        ("penstock.workers.reward.functions:digit", "did you mean 'digits'"),
    ],
)
def test_unknown_names_say_what_is_near(name, message):
    with pytest.raises(ConfigError, match=message):
        find_reward(name)


def test_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "scoring.py").write_text("")
    with pytest.raises(ConfigError, match=r"did you mean 'scoring\.py'"):
        find_reward(f"{tmp_path}/scorin.py:score")


def test_missing_function_in_a_file_names_the_nearest_one(tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, task):\n    return 0\n")
    with pytest.raises(ConfigError, match="did you mean 'score'"):
        find_reward(f"{tmp_path}/mine.py:scores")


@pytest.mark.parametrize(
    ("text", "error"),
    [("def score(:", "SyntaxError"), ("import nonexistent_thing", "ModuleNotFoundError"), ("1/0", "Zero")],
)
def test_a_file_that_cannot_be_imported_says_why(tmp_path, text, error):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=error):
        find_reward(f"{tmp_path}/mine.py:score")


def test_relative_paths_mean_the_directory_where_the_spec_was_made(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def score(response, task):\n    return 5.0\n")
    monkeypatch.chdir(tmp_path)
    spec = RewardSpec.of("mine.py:score")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(spec)).resolve().one("x", {}) == 5.0


def test_callables_travel_by_value():
    captured = 6.0
    spec = pickle.loads(pickle.dumps(RewardSpec.of(lambda response, task: captured)))
    assert spec.resolve().one("x", {}) == 6.0


def test_registered_functions_of_the_user_travel_by_value(monkeypatch):
    monkeypatch.setattr("penstock.workers.reward.reward_registry.REWARDS", dict(REWARDS))

    @reward("mine_for_a_test")
    def score(response, task):
        return 7.0

    spec = RewardSpec.of("mine_for_a_test")
    assert isinstance(spec.function, InlineValue)
    assert spec.resolve().one("x", {}) == 7.0


def test_imported_files_register_their_rewards_in_every_process(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.workers.reward.reward_registry.REWARDS", dict(REWARDS))
    text = "def score(response, task):\n    return 8.0\n"
    head = "from penstock.workers.reward.reward_registry import reward\n@reward('of_a_file')\n"
    (tmp_path / "mine.py").write_text(head + text)
    spec = RewardSpec.of("of_a_file", imports=(f"{tmp_path}/mine.py",))
    assert not isinstance(spec.function, InlineValue)
    assert spec.resolve().one("x", {}) == 8.0


def test_check_refuses_a_wrong_signature_before_anything_starts():
    with pytest.raises(ConfigError, match="fits no known signature"):
        RewardSpec.of(lambda text: 0.0).check()
