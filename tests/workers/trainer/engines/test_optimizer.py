import pytest

from penstock.conf.trainer import OptimizerConfig
from penstock.workers.trainer.engines.optimizer import learning_rate


def test_constant_is_constant() -> None:
    assert [learning_rate(OptimizerConfig(lr=2.0), step, 4) for step in (0, 3, 9)] == [2.0, 2.0, 2.0]


def test_warm_up_rises_linearly_and_skips_the_rate_zero() -> None:
    config = OptimizerConfig(lr=8.0, warmup_steps=4)
    assert [learning_rate(config, step, 100) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_cosine_falls_from_the_peak_over_the_middle_to_the_floor() -> None:
    config = OptimizerConfig(lr=10.0, schedule="cosine", warmup_steps=2, min_lr_share=0.2)
    rates = [learning_rate(config, step, 12) for step in (2, 7, 12, 50)]
    assert rates == pytest.approx([10.0, 6.0, 2.0, 2.0])


def test_a_warm_up_longer_than_the_run_does_not_divide_by_zero() -> None:
    assert learning_rate(OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=5), 5, 5) == pytest.approx(1.0)
