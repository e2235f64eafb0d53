"""Random failures of a chain: each node that lives and can reach a source gets every chunk, once, and in time."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated_chain import FOREVER_S, Link, SimulatedChain, model_s
from penstock.workers.weights.chain.plan import Timeouts
from tests.amounts import amount

LINK = Link(bandwidth=1e8, latency_s=0.001)
CHUNK_BYTES = 2**20


def simulated(num_nodes: int, num_chunks: tuple[int, ...] = (64,), **options: object) -> SimulatedChain:
    sources = {f"x{number}": count for number, count in enumerate(num_chunks)}
    return SimulatedChain(sources, [f"n{number:02}" for number in range(num_nodes)], CHUNK_BYTES, LINK, **options)


def test_a_chain_takes_what_the_model_says() -> None:
    for num_nodes in (1, 2, 16):
        seconds = simulated(num_nodes).run()
        assert 0.99 < seconds / model_s(64, CHUNK_BYTES, num_nodes, LINK) < 1.03


def test_chains_from_two_sources_take_no_longer_than_one() -> None:
    assert simulated(8, (32, 32)).run() <= 1.02 * simulated(8, (64,)).run()


def test_no_node_sends_more_than_the_payload() -> None:
    chains = simulated(8, (32, 32))
    chains.run()
    assert max(node.bytes_sent for node in chains.nodes.values()) == 64 * CHUNK_BYTES


def test_a_process_that_dies_costs_the_others_next_to_nothing() -> None:
    chains = simulated(16)
    chains.dies("n05", 0.3)
    assert chains.run() < model_s(64, CHUNK_BYTES, 16, LINK) + 0.05
    assert chains.reparented == 1


def test_a_machine_that_falls_silent_costs_the_others_the_floor_of_the_timeouts() -> None:
    chains = simulated(16)
    chains.dies("n05", 0.3, silently=True)
    assert chains.run() < model_s(64, CHUNK_BYTES, 16, LINK) + Timeouts().floor_s + 0.05


def test_chunks_go_on_while_the_trainer_still_writes() -> None:
    chains = simulated(4, written_s=lambda chunk: 0.1 * chunk)
    last = 0.1 * 63
    assert last < chains.run() < last + 0.1
    assert chains.reparented == 0


def test_a_trainer_that_takes_its_time_is_waited_for() -> None:
    chains = simulated(4, written_s=lambda chunk: 100.0)
    assert 100.0 < chains.run() < 101.0
    assert chains.reparented == 0


@dataclass(frozen=True)
class Trouble:
    deaths: list[tuple[int, float, bool]]
    stalls: list[tuple[int, float, float]]
    damage: set[int]


TIMES = st.floats(0, 1.0)
TROUBLES = st.builds(
    Trouble,
    st.lists(st.tuples(st.integers(0, 7), TIMES, st.booleans()), max_size=4),
    st.lists(st.tuples(st.integers(0, 9), TIMES, st.floats(0, 3.0)), max_size=4),
    st.sets(st.integers(0, 200), max_size=20),
)
CHUNKS = st.lists(st.integers(1, 12), min_size=1, max_size=2)


@settings(max_examples=amount(200))
@given(st.integers(1, 8), CHUNKS, st.integers(0, 5), TIMES, TROUBLES)
def test_histories_end_with_every_chunk_once(
    num_nodes: int, num_chunks: list[int], version: int, written_s: float, trouble: Trouble
) -> None:
    """`deaths` are of receivers; sources may stand still, but live. The n-th chunk on any way is damaged, for each n of
    `damage`: no more than seven times the same."""
    passed = iter(range(10**9))
    hurt: dict[tuple[str, int], int] = {}

    def damages(up: str, down: str, chunk: int) -> bool:
        if next(passed) not in trouble.damage or hurt.get((down, chunk), 0) == 7:
            return False
        hurt[down, chunk] = hurt.get((down, chunk), 0) + 1
        return True

    chains = simulated(
        num_nodes, tuple(num_chunks), version=version, damages=damages, written_s=lambda chunk: written_s * chunk
    )
    names = list(chains.nodes)
    for number, at_s, silently in trouble.deaths:
        if number < num_nodes:
            chains.dies(f"n{number:02}", at_s, silently)
    for number, at_s, for_s in trouble.stalls:
        chains.stands_still(names[number % len(names)], at_s, for_s)
    assert chains.run() < FOREVER_S
    for node in chains.living:
        assert sorted(node.kept) == list(range(sum(num_chunks)))
