"""A user's own loop over the halves of an update."""

from pathlib import Path

import numpy as np
import pytest

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import DataError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.session import session
from penstock.workers.protocols import AdamParams

pytestmark = pytest.mark.real


def test_gradients_of_two_calls_are_stepped_by_together(small_run: list[str], tmp_path: Path, cluster: str) -> None:
    words = ["rollout.engine=hf", f"output_dir={tmp_path}", "name=own", "trainer.num_ranks=2", "rollout.num_workers=1"]
    with session(load_config([*small_run, *words])) as handles:
        policy = handles.policy
        rows = policy.generate(handles.prompts.next(2), n=2)
        before = policy.logprobs(rows)
        for part in ([0, 1], [2, 3]):
            metrics = policy.forward_backward(rows.select(np.asarray(part)), sft_loss)
            assert metrics["actor/loss"] > 0
        assert all(map(np.array_equal, policy.logprobs(rows), before))
        assert policy.optim_step(AdamParams(learning_rate=1e-2))["actor/lr"] == 1e-2
        assert np.mean(np.concatenate(policy.logprobs(rows))) > np.mean(np.concatenate(before)) + 0.1
        with pytest.raises(DataError, match="Call forward_backward"):
            policy.optim_step()
        whole = policy.update(rows, sft_loss)
        assert whole["actor/lr"] == pytest.approx(1e-3)
        assert policy.publish() == 1
