"""The book of a run's losses: it counts them, ends what cannot be mended, and survives returns."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.conf.faults import FaultsConfig
from penstock.orchestrator.recovery.decisions import EndRun, Restart, Return, RunFaults
from tests.amounts import amount

ROLES = {"Rollout-0": "rollout", "Rollout-1": "rollout", "Reward-0": "reward", "Trainer-policy": "trainer"}


def book_of(**options: float) -> RunFaults:
    return RunFaults(FaultsConfig(**options))


def bring_back(book: RunFaults, title: str, now: float) -> float:
    return book.caught_up(title, now)


def lose(book: RunFaults, title: str, now: float, step: int) -> object:
    return book.lost(title, ROLES[title], now, step)


def test_losses_are_counted_by_role_and_seconds_once_however_many_are_lost() -> None:
    book = book_of()
    assert lose(book, "Rollout-0", 10.0, 1) == Restart(0.0)
    assert lose(book, "Rollout-1", 12.0, 1) == Restart(0.0)
    assert bring_back(book, "Rollout-0", 15.0) == 5.0
    assert book.metrics(16.0) == {"faults/rollout": 2.0, "faults/lost_s": 6.0}
    assert bring_back(book, "Rollout-1", 20.0) == 8.0
    assert lose(book, "Reward-0", 30.0, 2) == Restart(0.0)
    bring_back(book, "Reward-0", 31.5)
    assert book.metrics(100.0) == {"faults/reward": 1.0, "faults/rollout": 2.0, "faults/lost_s": 11.5}


def test_who_leaves_while_it_is_lost_is_lost_no_longer() -> None:
    book = book_of()
    lose(book, "Rollout-0", 10.0, 1)
    lose(book, "Rollout-1", 10.0, 1)
    book.gone("Rollout-1", 12.0)
    bring_back(book, "Rollout-0", 13.0)
    assert book.metrics(100.0) == {"faults/rollout": 2.0, "faults/lost_s": 3.0}
    book.gone("Reward-0", 101.0)  # one that was never lost
    assert not book.is_lost("Rollout-1")


def test_the_time_that_a_trainer_an_engine_and_a_return_cost_is_told() -> None:
    book = book_of()
    book.time.begin(0, 2, 0.0)
    lose(book, "Rollout-0", 10.0, 1)
    bring_back(book, "Rollout-0", 20.0)
    assert book.metrics(50.0)["faults/effective_time"] == 1 - 5 / 50
    book.time.trained(1, 10, 60.0)
    lose(book, "Trainer-policy", 60.0, 2)
    bring_back(book, "Trainer-policy", 65.0)
    assert book.metrics(100.0)["faults/effective_time"] == 1 - 10 / 100
    book.decide_return("the run", "", 100.0, 1)
    book.returned(105.0)
    book.time.begin(0, 2, 110.0)
    book.time.trained(1, 10, 120.0)
    assert book.metrics(200.0)["faults/effective_time"] == 1 - (10 + 20 + 35) / 200


def test_a_run_without_losses_has_lost_no_time() -> None:
    assert book_of().metrics(50.0) == {"faults/lost_s": 0.0}


def test_a_loss_that_is_known_is_not_counted_again() -> None:
    book = book_of()
    lose(book, "Rollout-0", 1.0, 1)
    assert lose(book, "Rollout-0", 2.0, 1) is None
    assert book.metrics(3.0)["faults/rollout"] == 1.0


def test_a_restart_that_failed_counts_as_a_fault_of_the_role() -> None:
    book = book_of()
    lose(book, "Rollout-0", 1.0, 1)
    assert isinstance(book.failed("Rollout-0", 2.0, 1), Restart)
    assert book.failed("Rollout-0", 4.0, 1) == Return("Rollout-0 was not brought back by 2 restarts")
    assert book.metrics(4.0)["faults/rollout"] == 3.0


def test_numbers_and_budgets_survive_a_return_and_all_serve_after_it() -> None:
    book = book_of(max_restarts=1)
    lose(book, "Rollout-0", 0.0, 5)
    lose(book, "Reward-0", 1.0, 5)
    bring_back(book, "Rollout-0", 2.0)
    assert isinstance(lose(book, "Rollout-0", 3.0, 6), Return)
    assert book.returned(43.0) == 40.0
    assert not any(book.is_lost(title) for title in ROLES)
    assert book.metrics(99.0) == {"faults/reward": 1.0, "faults/rollout": 2.0, "faults/lost_s": 43.0}
    assert isinstance(lose(book, "Rollout-0", 99.0, 4), Return)  # its one restart was at 0 s


def test_what_members_say_while_the_run_returns_changes_nothing() -> None:
    book = book_of(max_restarts=1)
    lose(book, "Reward-0", 0.0, 1)
    lose(book, "Rollout-0", 0.0, 1)
    assert isinstance(book.failed("Rollout-0", 1.0, 1), Return)
    before = book.metrics(2.0)
    assert lose(book, "Trainer-policy", 2.0, 1) is None
    assert book.failed("Reward-0", 2.0, 1) is None
    assert book.caught_up("Reward-0", 2.0) == 2.0
    assert book.metrics(2.0) == before


def test_a_return_too_many_ends_the_run_and_says_why() -> None:
    book = book_of(max_restarts=0, max_returns=2)
    for step, now in enumerate([0.0, 10.0]):
        assert isinstance(lose(book, "Rollout-0", now, step), Return)
        book.returned(now + 5)
    end = lose(book, "Rollout-1", 20.0, 9)
    assert end == EndRun("Rollout-1 was lost after faults.max_restarts=0 restarts in 600 s, and faults.max_returns=2")
    assert lose(book, "Reward-0", 30.0, 9) == end


def test_returns_of_long_ago_count_no_longer_if_the_run_has_got_on_since() -> None:
    book = book_of(max_restarts=0, max_returns=1, window_s=100.0)
    assert isinstance(lose(book, "Rollout-0", 0.0, 5), Return)
    book.returned(1.0)
    assert isinstance(lose(book, "Rollout-0", 200.0, 6), Return)
    book.returned(201.0)
    assert isinstance(lose(book, "Rollout-0", 9000.0, 6), EndRun)


def test_a_return_that_fails_is_tried_again_as_often_as_a_run_may_return() -> None:
    book = book_of(max_restarts=0, max_returns=2)
    assert isinstance(lose(book, "Rollout-0", 0.0, 1), Return)
    again = book.return_failed("Rollout-1 has died", 5.0, 1)
    assert again == Return("Rollout-1 has died")
    assert lose(book, "Rollout-1", 6.0, 1) is None, "what dies in a return comes of it"
    end = book.return_failed("Store has died", 7.0, 1)
    assert end == EndRun("Store has died, and faults.max_returns=2")
    assert book.return_failed("again", 8.0, 1) == end


def test_a_return_lasts_from_its_decision_until_one_of_its_tries_has_served() -> None:
    book = book_of(max_restarts=0, max_returns=2)
    lose(book, "Rollout-0", 10.0, 1)
    book.return_failed("Rollout-1 has died", 15.0, 1)
    assert book.returned(20.0) == 10.0


TITLES = st.sampled_from(sorted(ROLES))
SECONDS = st.integers(0, 200)


class Histories(RuleBasedStateMachine):
    """Any order of events that a supervisor may tell."""

    def __init__(self) -> None:
        super().__init__()
        self.config = FaultsConfig(max_restarts=2, window_s=300.0, max_returns=2)
        self.book = RunFaults(self.config)
        self.now, self.step, self.farthest = 0.0, 1, 1
        self.restarts: dict[str, list[float]] = {title: [] for title in ROLES}
        self.returns: list[tuple[float, int]] = []
        self.returning = False
        self.end: EndRun | None = None
        self.num_faults = 0
        self.before: dict[str, float] = {}

    def heard(self, title: str, decision: object) -> None:
        if self.end is not None:
            assert decision == self.end, "the end is final"
        elif self.returning:
            assert decision is None
        elif isinstance(decision, Restart):
            self.restarts[title].append(self.now)
        elif isinstance(decision, Return):
            self.returns.append((self.now, self.step))
            self.returning = True
        elif isinstance(decision, EndRun):
            self.end = decision

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def a_step_is_made(self) -> None:
        self.step += 1

    @rule(title=TITLES)
    def lost(self, title: str) -> None:
        known = self.book.is_lost(title)
        decision = lose(self.book, title, self.now, self.step)
        if not (known or self.returning or self.end):
            assert decision is not None
            self.num_faults += 1
        self.heard(title, decision)

    @rule(title=TITLES)
    def failed(self, title: str) -> None:
        if self.book.is_lost(title):
            self.num_faults += not (self.returning or self.end)
            self.heard(title, self.book.failed(title, self.now, self.step))

    @rule(title=TITLES)
    def goes_on(self, title: str) -> None:
        if self.book.is_lost(title):
            assert self.book.caught_up(title, self.now) >= 0

    @precondition(lambda self: self.returning and self.end is None)
    @rule(steps=st.integers(0, 3))
    def returned(self, steps: int) -> None:
        self.book.returned(self.now)
        self.returning, self.step = False, max(0, self.step - steps)

    @precondition(lambda self: self.returning and self.end is None)
    @rule()
    def return_failed(self) -> None:
        decision = self.book.return_failed("it failed", self.now, self.step)
        if isinstance(decision, EndRun):
            self.end = decision
        else:
            self.returns.append((self.now, self.step))

    @invariant()
    def budgets_hold(self) -> None:
        for times in self.restarts.values():
            for start in times:
                assert sum(start <= t < start + self.config.window_s for t in times) <= self.config.max_restarts
        for start, _ in self.returns:
            recent = [t for t, _ in self.returns if start <= t < start + self.config.window_s]
            assert len(recent) <= self.config.max_returns

    @invariant()
    def numbers_only_grow(self) -> None:
        metrics = self.book.metrics(self.now)
        assert all(metrics[name] >= value for name, value in self.before.items())
        assert sum(value for name, value in metrics.items() if name != "faults/lost_s") == self.num_faults
        assert metrics["faults/lost_s"] <= self.now
        self.before = metrics


Histories.TestCase.settings = settings(max_examples=amount(150), stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


@given(st.integers(1, 5), st.floats(1, 1e4))
def test_a_run_that_never_gets_past_a_step_ends_however_slow_its_steps_are(max_returns: int, step_s: float) -> None:
    book = book_of(max_returns=max_returns, window_s=100.0)
    now = 0.0
    for _ in range(3 * (max_returns + 1)):
        now += step_s
        decision = lose(book, "Trainer-policy", now, 7)
        if isinstance(decision, EndRun):
            return
        if isinstance(decision, Restart):
            bring_back(book, "Trainer-policy", now)
        else:
            book.returned(now)
    raise AssertionError("it went on for ever")
