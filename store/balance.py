"""Rows over the ranks of a data-parallel group, so that no rank waits long for another. Pure and deterministic."""

import heapq
from collections.abc import Sequence


def balance(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Positions of `costs` in `num_parts` parts with nearly equal sums, each ascending; parts may be empty.

    The largest differencing method of Karmarkar and Karp (1982, generalised to k parts): repeatedly merge the two
    partial solutions that are the most uneven, the heaviest part of one with the lightest of the other.
    """
    if num_parts == 1:
        return [list(range(len(costs)))]
    if not costs:
        return [[] for _ in range(num_parts)]
    # A solution is k (sum, positions) pairs, heaviest first. The serial number makes ties deterministic.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for position, cost in enumerate(costs):
        parts: list[tuple[int, list[int]]] = [(cost, [position])] + [(0, []) for _ in range(num_parts - 1)]
        heap.append((-cost, position, parts))
    heapq.heapify(heap)
    serial = len(costs)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [sorted(positions) for _, positions in heap[0][2]]
