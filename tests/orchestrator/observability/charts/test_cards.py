"""The cards of a run: what it cost."""

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.cli.main import make_parser
from penstock.orchestrator.observability.charts.cards import Card, cards


class Rows:
    """Metrics of three steps, of which the second was not measured."""

    keys = ["timing_s/step", "perf/tokens_per_s", "accuracy/heldout"]  # noqa: RUF012
    steps = np.array([1.0, 2.0, 3.0])

    def __getitem__(self, key: str) -> NDArray[np.float64]:
        values = {"timing_s/step": 1800, "perf/tokens_per_s": 1000}
        rows = [0.25, np.nan, 0.75] if key == "accuracy/heldout" else [values.get(key, np.nan)] * 3
        return np.array(rows, dtype=np.float64)


def cost(price: float, gpus: float = 8.0) -> Card | None:
    """The card of a run that was placed on other GPUs first."""
    events = [{"kind": "placed", "gpus": 1.0}, {"kind": "placed", "gpus": gpus}]
    return next((card for card in cards(Rows(), {}, events, 1.0, price) if card.label in ("Cost", "GPU-hours")), None)


def test_a_run_costs_gpu_hours_or_money() -> None:
    """Three steps of half an hour on 8 GPUs: 12 GPU-hours, 5.4 million tokens, 50 points."""
    each = "4 a step; 2.2 a million response tokens; 0.24 a point of held-out accuracy"
    assert cost(0.0) == Card("GPU-hours", "12.0", each)
    each = "10 a step; 5.6 a million response tokens; 0.6 a point of held-out accuracy"
    assert cost(2.5) == Card("Cost", "30.00", f"12.0 GPU-hours; {each}")
    assert cost(2.5, gpus=0.0) is None


@pytest.mark.parametrize(("text", "price"), [("2.5", 2.5), ("h100=2.5", 2.5)])
def test_a_price_is_given_as_plan_takes_it(text: str, price: float) -> None:
    assert make_parser().parse_args(["report", "run", "--price", text]).price == price


@pytest.mark.parametrize("text", ["-1", "h100", "nan", "inf"])
def test_a_price_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["report", "run", "--price", text])
    assert "--price" in capsys.readouterr().err
