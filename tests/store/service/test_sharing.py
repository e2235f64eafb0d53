"""What is free goes to whoever holds the fewest units, and nobody is waited for for long."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.ledger.leases import Holdings
from penstock.store.service.sharing import ShareClaim, Sharing, fair_share
from penstock.store.service.wire import LeaseRequest
from tests.amounts import amount

claims = st.lists(st.builds(ShareClaim, st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6)


def poured(free: int, claims: list[ShareClaim]) -> list[int]:
    """The definition: one unit after the other, to the one that holds the fewest of those with room; the first of
    them."""
    given = [0] * len(claims)
    for _ in range(free):
        able = [index for index, claim in enumerate(claims) if given[index] < claim.capacity]
        if able:
            given[min(able, key=lambda index: (claims[index].held + given[index], index))] += 1
    return given


@given(free=st.integers(0, 40), claims=claims)
def test_a_share_is_what_comes_of_giving_one_unit_after_the_other(free: int, claims: list[ShareClaim]) -> None:
    assert fair_share(free, claims[0], claims[1:]) == poured(free, claims)[0]


@given(free=st.integers(0, 40), claims=claims)
def test_a_share_is_the_same_if_others_come_counted(free: int, claims: list[ShareClaim]) -> None:
    assert fair_share(free, claims[0], Counter(claims[1:])) == fair_share(free, claims[0], claims[1:])


@given(free=st.integers(1, 40), claims=claims)
def test_whoever_holds_the_fewest_gets_something(free: int, claims: list[ShareClaim]) -> None:
    able = [claim for claim in claims if claim.capacity]
    if able:
        least = min(able, key=lambda claim: claim.held)
        others = [claim for claim in claims if claim is not least]
        assert fair_share(free, least, others) >= 1


def ask(client: str, max_held: int = 8, num_peers: int = 1) -> LeaseRequest:
    return LeaseRequest("rollout", max_held, client, client=client, max_held=max_held, num_peers=num_peers)


def test_one_that_is_alone_gets_everything() -> None:
    sharing = Sharing(Holdings())
    sharing.note_request(ask("a"))
    assert sharing.share(8, ask("a"), []) == 8
    assert sharing.share(8, LeaseRequest("reward", 64, "r"), []) == 8


def test_units_are_kept_for_those_that_are_expected_until_patience_is_over() -> None:
    sharing = Sharing(Holdings())
    sharing.note_request(ask("a", num_peers=3))
    assert sharing.share(6, ask("a"), []) == 2  # two have not come yet
    sharing.note_request(ask("b", num_peers=3))
    sharing.expect_only(["a"])
    assert sharing.share(6, ask("a"), []) == 6
    sharing.note_request(ask("b", num_peers=3))
    assert sharing.share(6, ask("a"), []) == 3
    sharing.left("b")
    assert sharing.share(6, ask("a"), []) == 6


def test_one_that_came_and_is_gone_is_expected_no_more() -> None:
    sharing = Sharing(Holdings())
    for client in ("a", "b"):
        sharing.note_request(ask(client, num_peers=2))
    sharing.left("b")
    assert sharing.share(6, ask("a"), []) == 6


class Recounted:
    """The definition of who is shared with: everybody that waits, and everybody that is expected and does not wait."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.most: dict[str, int] = {}
        self.num_peers = 0

    def share(self, free: int, request: LeaseRequest, requests: list[LeaseRequest]) -> int:
        others = [self._claim(one) for one in requests if one is not request]
        if request.max_held:
            there = {request.client, *(one.client for one in requests)}
            absent = [client for client in self.most if client not in there]
            others += [ShareClaim(self.held[one], max(0, self.most[one] - self.held[one])) for one in absent]
            others += [ShareClaim(0, request.max_held)] * max(0, self.num_peers - len(self.most))
        elif not others:
            return free
        return fair_share(free, self._claim(request), others)

    def _claim(self, request: LeaseRequest) -> ShareClaim:
        held = self.held[request.client]
        if request.max_held:
            return ShareClaim(held, min(request.max_units, max(0, request.max_held - held)))
        return ShareClaim(held, request.max_units)


@settings(max_examples=amount(100))
@given(seed=st.integers(0, 2**32))
def test_what_is_counted_as_it_changes_is_what_a_look_at_all_clients_finds(seed: int) -> None:
    random, holdings, known = Random(seed), Holdings(), Recounted()
    sharing, names = Sharing(holdings), "abcdef"
    for _ in range(40):
        client = random.choice(names)
        request = LeaseRequest("rollout", random.randint(1, 8), client, client=client,
                               max_held=random.choice((0, 6, 8)), num_peers=random.randint(1, 7))  # fmt: skip
        match random.choice(("ask", "hold", "hold", "leave", "impatience")):
            case "ask":
                sharing.note_request(request)
                if request.max_held and client not in known.most:
                    known.most[client] = request.max_held
                    if known.num_peers >= 0:
                        known.num_peers = max(known.num_peers, request.num_peers)
            case "hold":
                number = random.randint(-known.held[client], 8)
                holdings.add(client, number)
                known.held[client] += number
            case "leave":
                sharing.left(client)
                if known.most.pop(client, None) is not None and known.num_peers > 0:
                    known.num_peers -= 1
            case "impatience":
                present = random.sample(names, 4)
                sharing.expect_only(present)
                known.most = {one: most for one, most in known.most.items() if one in present}
                known.num_peers = -1
        asking = [ask(one, random.choice((0, 3, 8))) for one in random.choices(names, k=5)]
        assert sharing.next_request(asking) is min(asking, key=sharing.priority)
        waiting = [ask(one, random.choice((6, 8))) for one in random.choices(names, k=3)]
        for one in (request, waiting[0]):
            free = random.randint(1, 30)
            assert sharing.share(free, one, waiting) == known.share(free, one, waiting)
