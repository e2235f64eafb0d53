"""A simulated run is what a run would be: by hand where durations are constant, by its ledger wherever they are not."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.durations import SyncSeconds
from penstock.planner.lengths import Lengths
from penstock.planner.simulation.engines import FleetChanges
from penstock.planner.simulation.simulated_members import SimulatedSamples
from penstock.planner.simulation.simulated_trainer import SimulatedStep
from penstock.planner.simulation.simulation import Simulation
from tests.amounts import amount
from tests.planner.simulation.played import EASY, FAULTS, TEN, config_of, play, played, with_stages

GENERATED_S = 2 * 0.5 + 10 * 0.14
"""Two groups on each engine: two prompts are read, then four sequences decode in ten steps."""
UPDATE_S = 4 * 15 / 30
"""Four rows of 15 tokens on each rank."""


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    found = play(config_of())
    assert found.steps_s == pytest.approx([GENERATED_S + UPDATE_S + 1.5 + 0.5] * 3)
    step_s = found.step_s
    assert found.tokens_per_s == pytest.approx(80 / step_s)
    assert found.engines["decoding"] == pytest.approx(1.4 / step_s)
    assert found.engines["loading weights"] == pytest.approx(0.5 / step_s)
    assert found.ranks == pytest.approx(
        {"updating": UPDATE_S / step_s, "waiting for rollout": GENERATED_S / step_s,
         "waiting for the weight sync": 2.0 / step_s}
    )  # fmt: skip
    assert (found.staleness, found.staleness_mean) == ({0: 24}, 0.0)


def test_a_reward_that_takes_time_makes_the_last_group_later() -> None:
    """Its actor scores the 8 rows that come at once, in the order of their groups: 0.8 s."""
    found = play(config_of(), with_stages(reward=0.1))
    assert found.step_s == pytest.approx(GENERATED_S + 0.8 + UPDATE_S + 2.0)
    assert found.ranks["waiting for reward"] == pytest.approx(0.8 / found.step_s)


def test_turns_on_shared_devices_come_twice_a_step() -> None:
    config = config_of("placement=colocated")
    found = play(config, replace(EASY, turn=3.0))
    assert found.step_s == pytest.approx(GENERATED_S + 3.0 + UPDATE_S + 1.5 + 3.0 + 0.5)
    assert found.ranks["changing turns"] == pytest.approx(3.0 / found.step_s)


def test_one_step_off_the_longer_side_decides() -> None:
    """Engines have room for one batch: the next one is decoded while this one is trained."""
    config = config_of(max_staleness=1, **{"rollout.max_concurrent_samples": 4, "trainer.max_steps": 12})
    engines = play(config, replace(EASY, update_tokens_per_s=600.0, synced=SyncSeconds(0.2, 0.5, 0.1)))
    assert engines.step_s == pytest.approx(GENERATED_S + 0.5)
    ranks = play(config, replace(EASY, update_tokens_per_s=6.0))
    assert ranks.step_s == pytest.approx(10.0 + 0.25)
    assert ranks.ranks == pytest.approx({"updating": 10.0 / 10.25, "waiting for the weight sync": 0.25 / 10.25})


def test_a_version_that_comes_while_a_group_decodes_is_that_of_later_tokens() -> None:
    """One engine decodes group 1 from 1.6 s on, a token each 0.11 s, and loads version 1 after its third token. The
    second step trains it: three tokens of version 0 at staleness 1, seven of version 1."""
    config = config_of(
        max_staleness=1,
        **{"algorithm.group_size": 1, "trainer.groups_per_step": 1, "trainer.num_ranks": 1, "rollout.num_workers": 1,
           "rollout.max_concurrent_samples": 1, "trainer.max_steps": 2},
    )  # fmt: skip
    durations = replace(
        EASY, update_tokens_per_s=150.0, synced=SyncSeconds(0.6, 0.5, 0.0)
    )  # sealed 0.7 s after the update began
    found = play(config, durations)
    assert found.staleness == {0: 1, 1: 1}
    assert found.staleness_mean == pytest.approx(2 / 20)
    again = play(replace(config, rollout=replace(config.rollout, on_update="recompute")), durations)
    assert again.staleness_mean == found.staleness_mean
    assert again.seconds == pytest.approx(found.seconds + (5 + 2) / 10.0), "its prompt and two tokens are read again"


@pytest.mark.parametrize("num_engines", [2, 4])
def test_engines_that_finish_first_load_one_after_the_other(num_engines: int) -> None:
    changes = {"rollout.num_workers": num_engines, "trainer.max_steps": 12, "rollout.on_update": "finish"}
    simulation = Simulation(config_of(max_staleness=2, **changes), EASY, TEN)
    assert simulation.engines is not None
    seen: list[tuple[str, int, int]] = []

    def note(name: str, version: int, began: float) -> None:
        engines = simulation.engines.there  # type: ignore[union-attr]
        others = sum(engine.version < version for engine in engines.values())
        seen.append((name, len(engines[name].groups), others))

    simulation.engines.on_load = note
    played(simulation)
    names = [name for name, _, _ in seen]
    assert names[:num_engines] == [f"Rollout-{index}" for index in range(num_engines)]
    assert {groups for _, groups, _ in seen} == {0}
    assert [others for _, _, others in seen[:num_engines]] == list(range(num_engines))[::-1]


def test_engines_stay_full_across_steps_where_the_bound_lets_them() -> None:
    """One response in eight is ten times as long. A batch is not made from nothing: others go on beside it."""
    long = SimulatedSamples(lambda group, sample: 100 if group % 4 == 0 and sample == 0 else 10, prompt_tokens=5)
    wide = {"trainer.max_steps": 40, "rollout.max_concurrent_samples": 4}
    step_s = {bound: play(config_of(max_staleness=bound, **wide), samples=long).step_s for bound in (0, 1, 4)}
    assert step_s[4] < 0.8 * step_s[1] < 0.8 * step_s[0]


@settings(max_examples=amount(20), deadline=None)
@given(
    engines=st.integers(1, 6), groups=st.integers(1, 8), size=st.integers(1, 4), length=st.integers(1, 40),
    bound=st.integers(0, 3), room=st.integers(1, 4),
)  # fmt: skip
def test_more_engines_never_make_a_run_slower(
    engines: int, groups: int, size: int, length: int, bound: int, room: int
) -> None:
    """Across steps it holds where a group does not slow others on its engine: prompts that are read meanwhile, and a
    pause that meets a group that would else have begun after it, can make a run longer, as in a real one. And whatever
    comes waits for the end of a decode step, on one more engine."""
    alone = replace(EASY, prefill_tokens_per_s=1e12, decode={1: 0.1}, synced=SyncSeconds(1.5, 0.0, 0.25))

    def seconds(count: int) -> float:
        config = config_of(
            max_staleness=bound,
            **{"algorithm.group_size": size, "trainer.groups_per_step": groups, "rollout.num_workers": count,
               "rollout.max_concurrent_samples": room * size, "trainer.max_steps": 6},
        )  # fmt: skip
        samples = SimulatedSamples(lambda group, sample: length, prompt_tokens=5)
        return play(config, alone if bound else EASY, samples).seconds

    waits_s = 6 * 0.1 if bound else 1e-9
    assert seconds(engines + 1) <= seconds(engines) + waits_s


@settings(max_examples=amount(20), deadline=None)
@given(
    seed=st.integers(0, 1000), bound=st.integers(0, 3), window=st.integers(1, 5), faults=st.booleans(),
    stragglers=st.sampled_from((0, 2)), size=st.integers(1, 4), staying=st.booleans(),
)  # fmt: skip
def test_every_group_is_trained_once_within_the_bound_whatever_happens(
    seed: int, bound: int, window: int, faults: bool, stragglers: int, size: int, staying: bool
) -> None:
    config = config_of(
        max_staleness=bound, seed=seed,
        **{"store.window": min(window, bound * 4 + 1), "faults.straggler_factor": stragglers,
           "algorithm.group_size": size, "trainer.max_steps": 8},
    )  # fmt: skip
    lengths = Lengths.lognormal(60, 400, 0.9)
    samples = SimulatedSamples(lambda group, sample: lengths.of(group, sample, seed), prompt_tokens=7)
    changes = replace(FAULTS if faults else FleetChanges(), joins=() if staying else ((12.0, 2), (30.0, 1)))
    simulation = Simulation(config, with_stages(reward=0.02, group_advantage=0.01), samples, changes)
    trained: Counter[int] = Counter()
    simulation.trainer.watchers.append(Trained(trained, size))
    found = played(simulation)
    assert set(trained.values()) == {size}
    assert len(trained) == 8 * 4
    again = Simulation(config, with_stages(reward=0.02, group_advantage=0.01), samples, changes).run()
    assert again == found


SLOW_SEAL = replace(EASY, update_tokens_per_s=600.0, synced=SyncSeconds(4.0, 0.5, 0.25))
"""Updates take a tenth of a second, a version four until it is sealed."""


def steps_of(bound: int, lost_at: float | None = None) -> list[SimulatedStep]:
    """The steps of a run of many engines, whose ranks are lost at a time, for a second."""
    simulation = Simulation(config_of(max_staleness=bound, **{"rollout.num_workers": 4}), SLOW_SEAL, TEN)
    simulation.trainer.watchers.append(trained := Trained(Counter(), 2))
    if lost_at is not None:
        simulation.clock.at(lost_at, lambda _: simulation.trainer.lose_ranks(1.0))
    played(simulation)
    return trained.steps


@pytest.mark.parametrize("bound", [1, 2])
def test_a_step_counts_once_the_version_before_it_is_sealed(bound: int) -> None:
    first, second, third = steps_of(bound)
    assert first.counted == first.updated
    assert second.updated < first.published + 2.0, "it is made while the version before is written"
    assert second.counted == pytest.approx(first.published + 4.0)
    assert second.published == pytest.approx(first.published + 4.5), "once every engine serves the one before"
    assert third.counted == pytest.approx(second.published + 4.0)


def test_ranks_lost_while_a_version_is_written_make_the_step_beside_it_again() -> None:
    """The step that was made beside it has not counted. Ranks that are lost later have it."""
    _, second, _ = steps_of(1)
    early = steps_of(1, second.updated + 0.5)
    back = second.updated + 1.5
    assert early[1].updated >= back > second.updated
    assert early[1].counted == pytest.approx(back + 4.0)
    late = steps_of(1, second.counted + 0.1)
    assert late[1].counted == second.counted
    alone = steps_of(0)[0]
    assert steps_of(0, alone.published + 3.0)[0].served == pytest.approx(alone.served + 3.0 + 1.0)
    assert steps_of(0, alone.published - 0.01)[0].served > alone.served + 1.0, "lost while it updates"


class Trained:
    """Counts the rows of each group that were trained, and keeps the steps."""

    def __init__(self, rows: Counter[int], size: int) -> None:
        self._rows, self._size = rows, size
        self.steps: list[SimulatedStep] = []

    def trained(self, step: SimulatedStep) -> None:
        self.steps.append(step)
        for part in step.parts:
            self._rows.update(row // self._size for row in part)

    def closed(self, step: SimulatedStep) -> None: ...

    def served(self, step: SimulatedStep) -> None: ...


def test_who_is_lost_costs_the_time_until_another_is_there() -> None:
    config = config_of(**{"trainer.max_steps": 20})
    calm, disturbed = play(config), play(config, changes=FAULTS)
    assert disturbed.num_faults > 3
    assert disturbed.seconds > calm.seconds + FAULTS.replaced_s


def test_engines_that_join_take_their_part() -> None:
    config = config_of(max_staleness=1, **{"trainer.max_steps": 20, "rollout.max_concurrent_samples": 2})
    alone, joined = play(config), play(config, changes=FleetChanges(joins=((10.0, 4),)))
    assert joined.seconds < 0.8 * alone.seconds


@pytest.mark.parametrize(
    "words", [["algorithm=dapo"], ["algorithm=grpo", "algorithm.kl_coef=0.1"], ["algorithm=remax"]]
)
def test_other_dataflows_are_played_stage_by_stage(words: list[str]) -> None:
    config = config_of(*words)
    found = play(config, with_stages(reward=0.01, reference=0.05), replace(TEN, dropped=0.3))
    assert bool(found.dropped) == (words == ["algorithm=dapo"])


def test_a_group_that_an_engine_has_for_too_long_is_made_by_another() -> None:
    """One of three engines is twenty times slower. The first answer counts, and the slow engine's is given up."""
    slow = replace(EASY, decode={1: 2.0, 2: 2.2})
    found = {}
    for factor in (0, 3):
        config = config_of(**{"trainer.max_steps": 12, "faults.straggler_factor": factor, "rollout.num_workers": 3})
        simulation = Simulation(config, EASY, TEN, engine_durations=[slow, EASY, EASY])
        found[factor] = played(simulation)
    assert simulation.store.ledger.counters["stragglers/won"] > 5
    assert found[3].seconds < 0.6 * found[0].seconds
