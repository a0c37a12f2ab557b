"""Divides test modules among machines."""

from collections.abc import Iterable

from tests.ci.collect import Registration


def shards(entries: Iterable[Registration], count: int) -> list[list[Registration]]:
    """`count` lists of modules, each module in one; the longest first, each to the list with the least seconds.

    The sums of the lists differ by at most the longest module (R. L. Graham, "Bounds on multiprocessing timing
    anomalies", 1969). The result depends on nothing but the entries.
    """
    lists: list[list[Registration]] = [[] for _ in range(count)]
    seconds = [0.0] * count
    for entry in sorted(entries, key=lambda entry: (-entry.est_time, entry.file)):
        least = min(range(count), key=seconds.__getitem__)
        lists[least].append(entry)
        seconds[least] += entry.est_time
    return lists
