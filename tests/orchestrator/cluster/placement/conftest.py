"""A cluster of three nodes on this machine."""

from collections.abc import Iterator

import pytest

from tests.ray_cluster import connected, running_cluster

NODES = [{"num_cpus": 2}, {"num_cpus": 3, "labels": {"zone": "a"}}, {"num_cpus": 3, "labels": {"zone": "b"}}]


@pytest.fixture(scope="session")
def three_node_address(warm_python: list[str]) -> Iterator[str]:
    with running_cluster(warm_python, NODES) as address:
        yield address


@pytest.fixture(scope="module")
def three_nodes(three_node_address: str) -> Iterator[str]:
    """The tests of a module are its driver."""
    with connected(three_node_address):
        yield three_node_address
