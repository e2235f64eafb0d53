"""Plans that the simulator plays: the closed form says which are worth it, and the ledger decides between them."""

from dataclasses import replace
from functools import partial

from penstock.planner.candidates import with_keys
from penstock.planner.lengths import Lengths
from penstock.planner.search import Plan, Search, ordinary_first, plan_of
from penstock.planner.simulation.members import Samples
from penstock.planner.simulation.result import Simulated
from penstock.planner.simulation.simulation import Simulation

PLAYED = 4
"""Plans that are played: the closed form has rarely put the best behind so many (docs/planning.md)."""
STEPS = 8
"""Steps that count: more change a mean by less than plans differ."""


def played(plan: Plan, lengths: Lengths, steps: int = STEPS) -> Simulated:
    """Play a plan for so many steps beyond those that fill the pipeline. Raises `SimulationStuck`."""
    config = plan.config
    keys = {
        "trainer.max_steps": steps + config.max_staleness + 1,
        "rollout.max_concurrent_samples": min(one.slots for one in plan.engines),
    }
    engines = [one.durations for one in plan.engines for _ in range(one.count)]
    samples = Samples(partial(lengths.of, seed=config.seed), lengths.prompt)
    return Simulation(with_keys(config, keys), plan.ranks, samples, engine_durations=engines).run()


def best_classes(search: Search, num_played: int = PLAYED) -> list[Plan]:
    """The best plan of each class, the best class first: of the first few as the simulator plays them, and the others
    as the closed form has them. Raises `ResourceError` where nothing fits."""
    plan_of(search)
    classes = search.best()
    first = [with_seconds(plan, played(plan, search.lengths)) for plan in classes[:num_played]]
    return ordinary_first(first) + classes[num_played:]


def with_seconds(plan: Plan, found: Simulated) -> Plan:
    """The plan with the seconds of a step that were played."""
    return replace(plan, found=replace(plan.found, step_s=found.step_s, tokens_per_s=found.tokens_per_s))
