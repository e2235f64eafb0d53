"""What is free goes to whoever holds the fewest units, and nobody is waited for for long."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.store.service.messages import LeaseRequest
from penstock.store.service.waiting.sharing import Claim, Sharing, fair_share

claims = st.lists(st.builds(Claim, st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6)


def poured(free: int, claims: list[Claim]) -> list[int]:
    """The definition: one unit after the other, to the one that holds the fewest of those with room; the first of
    them."""
    given = [0] * len(claims)
    for _ in range(free):
        able = [index for index, claim in enumerate(claims) if given[index] < claim.capacity]
        if able:
            given[min(able, key=lambda index: (claims[index].held + given[index], index))] += 1
    return given


@given(free=st.integers(0, 40), claims=claims)
def test_a_share_is_what_comes_of_giving_one_unit_after_the_other(free: int, claims: list[Claim]) -> None:
    assert fair_share(free, claims[0], claims[1:]) == poured(free, claims)[0]


@given(free=st.integers(0, 40), claims=claims)
def test_a_share_is_the_same_if_others_come_counted(free: int, claims: list[Claim]) -> None:
    assert fair_share(free, claims[0], Counter(claims[1:])) == fair_share(free, claims[0], claims[1:])


@given(free=st.integers(1, 40), claims=claims)
def test_whoever_holds_the_fewest_gets_something(free: int, claims: list[Claim]) -> None:
    able = [claim for claim in claims if claim.capacity]
    if able:
        least = min(able, key=lambda claim: claim.held)
        others = [claim for claim in claims if claim is not least]
        assert fair_share(free, least, others) >= 1


def ask(client: str, max_held: int = 8, num_peers: int = 1) -> LeaseRequest:
    return LeaseRequest("rollout", max_held, client, client=client, max_held=max_held, num_peers=num_peers)


NONE_HELD: dict[str, int] = {}


def test_one_that_is_alone_gets_everything() -> None:
    sharing = Sharing()
    sharing.asked(ask("a"))
    assert sharing.share(8, ask("a"), [], NONE_HELD) == 8
    assert sharing.share(8, LeaseRequest("reward", 64, "r"), [], NONE_HELD) == 8


def test_units_are_kept_for_those_that_are_expected_until_patience_is_over() -> None:
    sharing = Sharing()
    sharing.asked(ask("a", num_peers=3))
    assert sharing.share(6, ask("a"), [], NONE_HELD) == 2  # two have not come yet
    sharing.asked(ask("b", num_peers=3))
    sharing.expect_only(["a"])
    assert sharing.share(6, ask("a"), [], NONE_HELD) == 6
    sharing.asked(ask("b", num_peers=3))
    assert sharing.share(6, ask("a"), [], NONE_HELD) == 3
    sharing.left("b")
    assert sharing.share(6, ask("a"), [], NONE_HELD) == 6


def test_one_that_came_and_is_gone_is_expected_no_more() -> None:
    sharing = Sharing()
    for client in ("a", "b"):
        sharing.asked(ask(client, num_peers=2))
    sharing.left("b")
    assert sharing.share(6, ask("a"), [], NONE_HELD) == 6
