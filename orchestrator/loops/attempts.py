"""The environment of a session: attempts at tasks, as rows that a loop trains on.

rows = run.environment.play(run.prompts.next(8), n=8)     # an attempt a row, with its reward
run.environment.lost                                      # attempts without a row, by reason
"""

from collections import Counter
from collections.abc import Sequence

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import DataError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import get_all
from penstock.orchestrator.control.evaluation import play_timeout_s
from penstock.orchestrator.loops.policy import Prompt
from penstock.store.data.rows import Rows
from penstock.store.spec import given
from penstock.workers.attempts.attempts_worker import ERROR_WINDOW, AttemptColumns
from penstock.workers.lifecycle.error_share import ErrorShare
from penstock.workers.protocols import Sampling
from penstock.workers.rollout.rollout_worker import sample_seed
from penstock.workers.trajectory import FAILED, Trajectory


class Attempts:
    """Attempts in the environment that `environment.name` names.

    Lifecycle: `play` over a fleet that has started, any number of times; `lost` after each.
    """

    def __init__(self, fleet: Fleet, config: RunConfig, flow: Dataflow) -> None:
        self._fleet, self._config = fleet, config
        (stage,) = flow.of_kind("rollout")
        self._columns = AttemptColumns([column.name for column in stage.writes], given(flow)[0])
        self._errors = ErrorShare(config.environment.max_error_share, ERROR_WINDOW, "attempts", "environment")
        self.lost: Counter[str] = Counter()
        """Attempts of the last call that have no row, by reason: what the environment rejects, and what fails."""

    def play(self, prompts: Sequence[Prompt], n: int = 1, sampling: Sampling | None = None) -> Rows:
        """Play `n` attempts at each task with the weights published last, and the seeds that a run's have. `sampling`
        None: `rollout.sampling`.

        Returns a row for each attempt that counts: `task`, and the columns that a run's attempts have, such as
        `reward`, `response_ids` and `spans`; `group_ids` are the tasks' indices. Others are counted in `lost`. Raises
        `RewardFailure` if too many fail (`environment.max_error_share`), `DataError` if no attempt is left, and what
        engines fail with.
        """
        groups = self._played(prompts, [self._samplings(prompt, n, sampling) for prompt in prompts])
        self.lost = Counter()
        dropped = self._config.rollout.truncated_to("drop")
        kept: list[tuple[Prompt, Trajectory]] = []
        for prompt, group in zip(prompts, groups, strict=True):
            for played in group:
                attempt = played.without(dropped)
                outcome = attempt.outcome
                self._errors.add(outcome.detail if outcome.kind == FAILED else None)
                if outcome.is_trained:
                    kept.append((prompt, attempt))
                else:
                    self.lost[outcome.reason] += 1
        self._errors.check()
        if not kept:
            raise DataError(
                f"no attempt is left of {len(prompts) * n}: {dict(self.lost)}. The environment rejects them or fails; "
                f"its last error: {self._errors.last_error or 'none'}."
            )
        columns = {"task": [prompt.task for prompt, _ in kept], **self._columns.of([attempt for _, attempt in kept])}
        return Rows.from_lists(columns, group_ids=[prompt.index for prompt, _ in kept])

    def _samplings(self, prompt: Prompt, n: int, sampling: Sampling | None) -> list[Sampling]:
        options = self._config.rollout.sampling
        chosen = sampling or Sampling.of(options)
        if not options.seeded or chosen.temperature == 0:
            return [chosen] * n
        first = sample_seed(self._config.seed, prompt.index)
        return [chosen.seeded(first + index) for index in range(n)]

    def _played(self, prompts: Sequence[Prompt], samplings: Sequence[Sequence[Sampling]]) -> list[Sequence[Trajectory]]:
        """The attempts of each task's group, which one actor plays."""
        players, engines = self._fleet.role("environment"), self._fleet.role("rollout")
        calls = []
        for index, (name, handle) in enumerate(players):
            share = slice(index, None, len(players))
            tasks, seen = [one.task for one in prompts[share]], [one.pictures for one in prompts[share]]
            calls.append((name, handle.trajectories.remote(engines, tasks, samplings[share], seen)))
        timeout_s = play_timeout_s(self._config, -(-sum(map(len, samplings)) // len(players)))
        found: list[Sequence[Trajectory]] = [()] * len(prompts)
        for index, part in enumerate(get_all(calls, phase="play", timeout_s=timeout_s)):
            found[index :: len(players)] = part
        return found
