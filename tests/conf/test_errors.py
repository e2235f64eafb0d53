import inspect
import pickle

import pytest

from penstock.conf import errors
from penstock.conf.errors import (
    ConfigError,
    DataError,
    ModelError,
    PenstockError,
    ResourceError,
    RunInUse,
    SandboxUnavailable,
    suggest,
)

ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PenstockError)]
OF_THE_USER = ConfigError | DataError | ModelError | ResourceError | RunInUse | SandboxUnavailable


def test_the_hierarchy_is_found():
    assert len(ERRORS) >= 14


@pytest.mark.parametrize("error_class", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_pickles_with_its_message(error_class):
    restored = pickle.loads(pickle.dumps(error_class("key=3: too small")))
    assert type(restored) is error_class
    assert str(restored) == "key=3: too small"


@pytest.mark.parametrize("error_class", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_crosses_ray(error_class):
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    restored = cloudpickle.loads(cloudpickle.dumps(error_class("key=3: too small")))
    assert type(restored) is error_class
    assert str(restored) == "key=3: too small"


@pytest.mark.parametrize("error_class", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_says_what_it_is_for(error_class):
    assert error_class.__doc__


def test_faults_that_a_user_can_mend_end_with_2_and_all_others_with_1():
    for error_class in ERRORS:
        assert error_class.exit_code == (2 if issubclass(error_class, OF_THE_USER) else 1)


def test_suggest_names_the_nearest_and_all_where_they_are_few():
    assert suggest("gpro", ["grpo", "sft"]) == "; did you mean 'grpo'? Known: grpo, sft."
    assert suggest("zzz", ["grpo", "sft"]) == ". Known: grpo, sft."
    assert suggest("name_7x", [f"name_{i}" for i in range(30)]) == "; did you mean 'name_7'?"
