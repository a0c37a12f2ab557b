"""Which numbers go together: bins that hold no more than a capacity, and parts of about equal sums."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into bins of `capacity`: the largest first, each into the first bin that has room (Johnson 1973).

    Needs at most 11/9 of the fewest possible bins, plus 2/3. Of equal sizes the first item goes first. Takes O(n log n).
    Raises ValueError for an item larger than `capacity`.
    """
    order = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist()
    if order and sizes[order[0]] > capacity:
        raise ValueError(f"item {order[0]} of size {sizes[order[0]]} does not fit into a bin of {capacity}")
    # A tournament over the room of all bins: node i has the larger of its children 2i and 2i + 1, leaves are the bins.
    leaves = 1 << max(0, len(order) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for item in order:
        size, node = sizes[item], 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        place = node - leaves
        if place == len(bins):
            bins.append([])
        bins[place].append(item)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split items into `parts` of about equal total cost, with no more than ceil(n / parts) items in any.

    The largest differencing method (Karmarkar and Karp 1982) on groups of `parts` items: the two groups whose parts differ
    most are merged, the costliest part of one with the cheapest of the other. Takes O(n log n). Parts hold rising items.
    """
    items: list[int | None] = np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable").tolist()
    items += [None] * (-len(items) % parts)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(items), parts):
        group = [(0.0, list[int]()) if i is None else (float(costs[i]), [i]) for i in items[start : start + parts]]
        heap.append((group[-1][0] - group[0][0], start, group))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(parts)]
