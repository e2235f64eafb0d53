"""Two runs are compared step by step, and the quantity that others follow from is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.observability.comparison import (
    CAUSES,
    Difference,
    compare,
    difference_in,
    differences_text,
    hashed_lines,
    loose_ends,
    verdict,
)
from penstock.orchestrator.observability.manifest import FILE
from penstock.orchestrator.run_directory.run_directory import RunDirectory, to_yaml
from penstock.workers.trainer.row_hashes import QUANTITIES

HASHES = st.fixed_dictionaries({}, optional={f"hash/{name}": st.sampled_from("ab") for name in QUANTITIES})


def line(step: int, **hashes: str) -> dict[str, object]:
    return {"step": step, "reward/mean": 0.5} | {f"hash/{name}": value for name, value in hashes.items()}


@given(HASHES, HASHES)
def test_the_first_that_differs_has_the_same_before_it(before, now):
    found = difference_in(before, {"step": 4, **now})
    differing = [name for name in QUANTITIES if {before.get(f"hash/{name}"), now.get(f"hash/{name}")} == {"a", "b"}]
    assert found == (Difference(4, differing[0]) if differing else None)


def test_runs_are_compared_over_the_steps_that_both_have():
    first = {step: line(step, tokens="a", rewards="b") for step in (2, 3, 4)}
    assert compare(first, {step: first[step] for step in (3, 4)}) == (4, None)
    assert compare(first, first | {4: line(4, tokens="a", rewards="c")}) == (3, Difference(4, "rewards"))
    with pytest.raises(ConfigError, match="one has steps 2 to 4, the other 7 to 7"):
        compare(first, {7: line(7, tokens="a")})


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_the_verdict_names_step_and_quantity_and_where_to_look(quantity):
    told = verdict(6, Difference(7, quantity))
    assert told.startswith("the same bits up to step 6; step 7 is the first that differs, in its ")
    assert CAUSES[quantity] in told
    assert verdict(6, None) == "the same bits up to step 6"


def test_only_the_conditions_of_exact_runs_promise_the_same_bits():
    assert list(loose_ends({"max_staleness": 0, "rollout": {"engine": "hf", "sampling": {"seeded": True}}})) == []
    reasons = list(
        loose_ends(
            {
                "max_staleness": 2,
                "rollout": {"engine": "vllm", "sampling": {"seeded": False}},
                "trainer": {"num_gpus_per_rank": 1},
            }
        )
    )
    assert [next(word for word in ("timing", "rounding", "sampled", "kernels") if word in one) for one in reasons] == [
        "timing", "rounding", "sampled", "kernels",
    ]  # fmt: skip


def made_run(path, *lines, manifest=None):
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(RunConfig()))
    directory = RunDirectory.open(path)
    for each in lines:
        directory.log_metrics(each)
    if manifest is not None:
        directory.write_text(FILE, manifest)
    return directory


def test_a_run_without_hashes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no step has hashes"):
        hashed_lines(made_run(tmp_path / "old", {"step": 1, "reward/mean": 1.0}))


def test_manifests_are_listed_by_what_differs_and_what_was_set_is_skipped(tmp_path):
    first = made_run(
        tmp_path / "first", manifest='{"lock": {"torch": "2.12"}, "config": {"name": "a", "plan": "auto"}}'
    )
    second = made_run(tmp_path / "second", manifest='{"lock": {"torch": "2.13"}, "config": {"name": "b"}}')
    assert differences_text(first.path, second.path, ["config.plan"]).splitlines() == [
        "their manifests differ:", '  lock.torch: "2.12" | "2.13"',
    ]  # fmt: skip
    assert 'config.plan: "auto" | absent' in differences_text(first.path, second.path)
    assert differences_text(first.path, first.path) == "their manifests are the same"
    assert str(tmp_path / "none") in differences_text(first.path, tmp_path / "none")
