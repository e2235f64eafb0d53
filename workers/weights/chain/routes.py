"""The routes of a version: one chain of the receiving nodes for each node that has trainer ranks. Pure.

    version 12   trainer X ─▶ a ─▶ b ─▶ c      trainer Y ─▶ b ─▶ c ─▶ a
    version 13   trainer X ─▶ b ─▶ c ─▶ a      trainer Y ─▶ c ─▶ a ─▶ b

The order turns with the version and from chain to chain, so that no node is always the last, and in a version each
sends about as much as any other. Every node computes the same, so no node has to be told its place.
"""

from collections.abc import Sequence

import msgspec

from penstock.network.connection import Address

NEARBY = 3
"""Nodes of the chain that are asked before its trainer is: a node that dies then costs its neighbours little, and all
nodes share the trainer's link."""


class Broadcast(msgspec.Struct, frozen=True):
    """The announcement of a version that goes to many nodes; each of them gets it before the ranks write."""

    number: int
    """Number among broadcasts: greater than any before, also where a version is sent again because it has failed."""
    version: int
    receivers: list[str]
    """Nodes that are to get all of it."""
    addresses: dict[str, Address]
    """Address of the listener of every node that has ranks or receives."""


def chain(broadcast: Broadcast, sources: Sequence[str], source: str) -> list[str]:
    """The nodes after `source`, which has trainer ranks, in the order in which its chunks pass them."""
    others = [node for node in sorted(broadcast.receivers) if node != source]
    if not others:
        return []
    apart = max(1, len(others) // len(sources))
    first = (broadcast.version + sources.index(source) * apart) % len(others)
    return others[first:] + others[:first]


def upstreams(order: Sequence[str], source: str, node: str) -> list[str]:
    """Nodes that a node of the chain asks for chunks, best first. All are before it, so that no two ask each other."""
    place = order.index(node)
    return [*reversed(order[max(0, place - NEARBY) : place]), source]
