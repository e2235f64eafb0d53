"""The costs by which ranks choose groups for each micro-batch (`trainer.sequence_parallel_size=auto`), measured before
the first step of an asynchronous run.

With `max_staleness=0` they are not measured: results depend on groups by rounding, and such a run has the same bits
whenever it is made again.

    few tokens ─▶ seconds of any pass      many in short rows ─▶ of a token      as many in one row ─▶ of attention
"""

from collections.abc import Callable

from penstock.store.data.rows import Rows
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.update.rank_groups import PassCost, PassCosts

MOST_TOKENS, SHORT = 1024, 64
"""Tokens of a rank in the larger trials, and of a short row."""
NUM_TRIES = 2
"""Number of tries of each, of which the shortest counts."""
DEADLINE_S = 60.0
"""Seconds after which what has not been measured is estimated."""
Seconds = Callable[[list[int], int], float]
"""Measures a pass over rows of these lengths, split over groups of so many ranks: the same value on every rank."""


def measured_costs(trainer: PolicyTrainer) -> PassCosts:
    """Measure each size of a group; leave estimates where that would take too long. The same on every rank. Collective.
    Changes nothing that is trained."""

    def seconds(lengths: list[int], size: int) -> float:
        responses = [[0] * (length - 1) for length in lengths]
        rows = Rows.from_lists({"prompt_ids": [[0]] * len(lengths), "response_ids": responses})
        return max(trainer.ranks.gather_ranks(trainer.seconds_of_pass(rows, size)))

    longest = min(MOST_TOKENS, trainer.config.microbatch_tokens, trainer.max_length or MOST_TOKENS)
    found = measure(seconds, trainer.engine.split_sizes, longest)
    return PassCosts(found) if found else trainer.estimated_costs()


def measure(seconds: Seconds, sizes: list[int], longest: int, deadline_s: float = DEADLINE_S) -> dict[int, PassCost]:
    """Costs by size, of 1 first; none if the trials take longer than the deadline. `longest`: most tokens of a row.
    Noise makes no group faster than its ranks are alone."""
    found, spent = dict[int, PassCost](), 0.0
    for size in sizes:
        shortest = []
        for lengths in shapes(size, longest):
            tries = [seconds(lengths, size) for _ in range(NUM_TRIES)]
            spent += sum(tries)
            if spent > deadline_s:
                return {}
            shortest.append(min(tries))
        cost = fit(size, longest, *shortest)
        found[size] = cost.at_least(found[1], size) if found else cost
    return found


def shapes(size: int, longest: int) -> tuple[list[int], list[int], list[int]]:
    """Lengths of the rows of the three trials: few tokens, many in short rows, as many in long ones."""
    short = min(SHORT, longest)
    return [2 * size], [short] * (size * longest // short), [longest] * size


def fit(size: int, longest: int, few: float, short: float, long: float) -> PassCost:
    """The cost that explains three trials' seconds."""
    (_, of_short, of_long) = shapes(size, longest)
    tokens, squares = sum(of_short), sum(one**2 for one in of_short)
    more = sum(one**2 for one in of_long) - squares
    square = max(0.0, long - short) / more if more > 0 else 0.0
    return PassCost(few, max(short - few - square * squares, 0.01 * short) / tokens, square)
