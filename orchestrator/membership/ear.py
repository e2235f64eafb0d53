"""The controller's listener for wishes from outside, which it grants one after the other. They come by the mailbox of
the agent on the driver's node; `asking.py` is the sender.
"""

import contextlib
from typing import Any

from ray.exceptions import RayError

from penstock.conf.errors import CannotScale
from penstock.conf.run import RunConfig
from penstock.orchestrator.membership.members import Members
from penstock.orchestrator.membership.wishes import Wish


class Ear:
    """Lifecycle: `run` until it is cancelled."""

    def __init__(self, agent: Any, members: Members, config: RunConfig) -> None:
        """`agent`: the handle of the agent on the driver's node."""
        self._agent, self._members, self._config = agent, members, config

    async def run(self) -> None:
        with contextlib.suppress(RayError):  # the agent is gone, which others tell
            while True:
                number, (texts, drain_s) = await self._agent.take_question.remote()
                await self._agent.answer.remote(number, await self._answer(texts, drain_s))

    async def _answer(self, texts: list[str], drain_s: float | None) -> dict[str, Any]:
        """The answer to wishes, as plain data, since it goes through the agent."""
        try:
            wishes = [Wish.of(text) for text in texts]
            if self._config.rollout.follows_cluster and any(wish.role == "rollout" for wish in wishes):
                raise CannotScale(
                    "rollout: there are as many engines as the cluster has room for (rollout.num_workers=auto). Add or "
                    "remove nodes, or start the run with a number."
                )
            done = await self._members.change(wishes, drain_s)
        except CannotScale as error:
            return {"refused": str(error), "done": [], "problems": []}
        problems = [problem for one in done for problem in one.problems]
        return {"refused": "", "done": [str(one) for one in done], "problems": problems}
