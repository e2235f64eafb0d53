"""Which checkpoints stay, whatever steps there are and in whatever order their scores come."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.faults import CheckpointConfig
from penstock.orchestrator.checkpointing.retention import score_of, steps_to_remove

CONFIGS = st.builds(
    CheckpointConfig,
    keep_last=st.integers(1, 3), keep_best=st.integers(0, 3), keep_every_steps=st.integers(0, 7),
    best_mode=st.sampled_from(("max", "min")),
)  # fmt: skip


@given(config=CONFIGS, scores=st.dictionaries(st.integers(1, 40), st.sampled_from((0.25, 0.5, 0.75))), data=st.data())
def test_the_newest_the_best_and_those_that_are_awaited_stay_and_no_more(config, scores, data):
    steps = sorted(scores.keys() | data.draw(st.sets(st.integers(1, 40))))
    awaited = data.draw(st.sets(st.sampled_from(steps))) if steps else set()
    removed = steps_to_remove(steps, scores, awaited, config)
    kept = [step for step in steps if step not in removed]
    assert set(steps[-config.keep_last :]) | awaited <= set(kept)
    every = config.keep_every_steps
    plain = [step for step in kept if not (every and step % every == 0)]
    assert len(plain) <= config.keep_last + config.keep_best + len(awaited)
    sign = 1 if config.best_mode == "max" else -1
    best_first = sorted(scores, key=lambda step: (-sign * scores[step], step))
    assert set(best_first[: config.keep_best]) <= set(kept)
    assert set(removed) <= set(steps)


@given(config=CONFIGS, accuracies=st.lists(st.sampled_from((0.0, 0.5, 1.0)), min_size=1, max_size=20), data=st.data())
def test_the_best_stay_though_scores_come_late_and_out_of_order(config, accuracies, data):
    """Step by step: each is saved, and some of the scores that are awaited come."""
    there, scores, awaited = list[int](), dict[int, float](), set[int]()

    def prune():
        removed = steps_to_remove(there, {step: scores[step] for step in there if step in scores}, awaited, config)
        there[:] = [step for step in there if step not in removed]

    for step in range(1, len(accuracies) + 1):
        there.append(step)
        awaited.add(step)
        prune()
        for come in data.draw(st.sets(st.sampled_from(sorted(awaited)))):
            awaited.discard(come)
            scores[come] = accuracies[come - 1]
            prune()
    for come in data.draw(st.permutations(sorted(awaited))):
        awaited.discard(come)
        scores[come] = accuracies[come - 1]
        prune()
    sign = 1 if config.best_mode == "max" else -1
    best_first = sorted(scores, key=lambda step: (-sign * scores[step], step))
    assert set(best_first[: config.keep_best]) <= set(there)


def test_what_is_no_number_is_no_score():
    config = CheckpointConfig()
    values = [0.5, 1, None, True, "0.5", float("nan"), float("inf")]
    assert [score_of({"accuracy/heldout": value}, config) for value in values] == [0.5, 1.0, *[None] * 5]
    assert score_of({}, config) is None
