from hypothesis import given
from hypothesis import strategies as st

from tests.ci.collect import Registration
from tests.ci.shards import shards

ENTRIES = st.lists(st.integers(1, 2000), max_size=40).map(
    lambda seconds: [Registration(f"tests/e2e/test_{i}.py", "stage-b-cpu", float(s)) for i, s in enumerate(seconds)]
)


@given(ENTRIES, st.integers(1, 9))
def test_each_module_is_in_one_shard_and_sums_differ_by_at_most_the_longest_module(entries, count):
    found = shards(entries, count)
    assert len(found) == count
    assert sorted(e.file for shard in found for e in shard) == sorted(e.file for e in entries)
    sums = [sum(e.est_time for e in shard) for shard in found]
    assert max(sums) - min(sums) <= max((e.est_time for e in entries), default=0)


@given(ENTRIES, st.integers(1, 9), st.randoms())
def test_shards_are_the_same_on_every_machine_and_begin_with_their_longest_module(entries, count, random):
    shuffled = random.sample(entries, len(entries))
    found = shards(entries, count)
    assert shards(shuffled, count) == found
    assert all(shard == sorted(shard, key=lambda e: -e.est_time) for shard in found)
