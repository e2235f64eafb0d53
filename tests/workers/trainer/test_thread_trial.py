"""How fast a rank is by threads, without a trace in what it trains."""

from collections.abc import Callable

import torch

from penstock.workers.trainer.assembly import NUM_ROWS, NUM_TOKENS, _rows, seconds_per_token, use_threads
from penstock.workers.trainer.trainer import PolicyTrainer


def test_each_number_of_threads_is_tried_and_nothing_that_is_trained_changes(
    make_trainer: Callable[..., PolicyTrainer],
) -> None:
    trainer = make_trainer()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = seconds_per_token(trainer, [1, 2])
    assert found.keys() == {1, 2}
    assert min(found.values()) > 0
    assert torch.get_num_threads() == 2
    after = trainer.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert trainer.num_updates == 0


def test_rows_that_are_tried_fit_the_model() -> None:
    assert _rows(16).lengths("response_ids").tolist() == [15] * NUM_ROWS
    assert _rows(4096).lengths("response_ids").tolist() == [NUM_TOKENS] * NUM_ROWS


def test_no_number_leaves_the_threads_as_they_are() -> None:
    use_threads(2)
    use_threads(0)
    assert torch.get_num_threads() == 2
