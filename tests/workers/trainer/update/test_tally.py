"""Metrics of an update that are no sums."""

from penstock.workers.trainer.update.tally import with_explained_variance, with_shares

MOMENTS = {"return_mean": 2.0, "return_square_mean": 5.0, "value_error_mean": 0.5, "value_error_square_mean": 0.5}


def named(moments):
    return {f"critic/{name}": value for name, value in moments.items()}


def test_the_squares_give_way_to_what_they_are_for():
    # variances 5 - 4 = 1 and 0.5 - 0.25 = 0.25
    metrics = with_explained_variance(named(MOMENTS) | {"critic/lr": 0.1, "actor/loss": 1.0}, "critic")
    assert metrics == {
        "critic/return_mean": 2.0,
        "critic/value_error_mean": 0.5,
        "critic/explained_variance": 0.75,
        "critic/lr": 0.1,
        "actor/loss": 1.0,
    }


def test_equal_returns_leave_it_out():
    metrics = with_explained_variance(named(MOMENTS | {"return_square_mean": 4.0}), "critic")
    assert metrics == {"critic/return_mean": 2.0, "critic/value_error_mean": 0.5}


def test_metrics_of_another_loss_stay_as_they_are():
    metrics = {"critic/value_loss": 1.0, "critic/return_square_mean": 3.0}
    assert with_explained_variance(metrics, "critic") == metrics


def test_padding_is_a_share_of_the_places_that_there_were():
    sums = {"padding/places": 200.0, "padding/tokens": 150.0, "actor/lr": 0.1}
    assert with_shares(sums, "actor") == {"actor/lr": 0.1, "actor/padding_share": 0.25}
    assert with_shares({"padding/places": 0.0, "padding/tokens": 0.0}, "actor") == {}
