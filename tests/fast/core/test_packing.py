import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.schedule import plan_steps
from miles.core.packing import cp_slice, join_slices, pack, unpack
from miles.core.train_batch import Column, TrainBatch, concat

LAYOUTS = ("zigzag", "contiguous")
# B samples, T tokens of a sample, R its response tokens, L layers, K entries
L, K = 3, 2


def carried_batch(
    lengths=((9, 5), (1, 0), (16, 7), (5, 4), (12, 11), (3, 1), (7, 0)), trajectory=(0, 1, 2, 2, 2, 3, 4)
):
    rng = np.random.default_rng(0)
    B = len(lengths)

    def rows(axis_lengths, *trailing, dtype="float32"):
        if dtype == "float32":
            return [rng.standard_normal((n, *trailing)).astype(dtype) for n in axis_lengths]
        return [rng.integers(0, 100, (n, *trailing)).astype(dtype) for n in axis_lengths]

    T = [t for t, _ in lengths]
    R = [r for _, r in lengths]
    masks = [[float((j // 2) % 2 == 0) for j in range(r)] for r in R]
    log_probs = rows(R)
    for row in log_probs:
        row[1::3] = -0.0
        row[2::5] = np.nan
    return TrainBatch(
        columns={
            "tokens": Column.from_rows(rows(T, dtype="int64"), "token", "int64"),
            "loss_mask": Column.from_rows(masks, "response"),
            "rollout_log_probs": Column.from_rows(log_probs, "response"),
            "values": Column.from_rows(rows(R), "response"),
            "routed_experts": Column.from_rows(
                rows([t - 1 for t in T], L, K, dtype="int32"), "transition", "int32", (L, K)
            ),
            "teacher_topk_log_probs": Column.from_rows(rows(R, K), "response", "float32", (K,)),
            "sample_index": Column.from_rows(range(100, 100 + B), "sample", "int64"),
            "trajectory": Column.from_rows(trajectory, "sample", "int64"),
            "adapter_slot": Column.from_rows([b % 3 for b in range(B)], "sample", "int32"),
            "pixel_values": Column.from_rows(
                [{"pixels": rng.random((b + 1, 4))} if b % 2 else None for b in range(B)], "opaque"
            ),
        },
        extra={"entropy_bonus": Column.from_rows(rows(T), "token")},
    )


def shard(batch, dp):
    """Samples of each rank when one optimizer step takes the batch."""
    (plan,) = plan_steps(
        np.asarray(batch["trajectory"].values),
        batch.total_lengths,
        np.ones(len(batch), dtype=bool),
        global_batch_size=None,
        num_steps=None,
        world_size=dp,
        max_tokens=10**6,
    )
    return [sorted(np.concatenate(rank).tolist()) for rank in plan.micro_batches]


def assert_same(found, wanted):
    assert set(dict(found.all_columns())) == set(dict(wanted.all_columns()))
    assert set(found.extra) == set(wanted.extra)
    for name, column in wanted.all_columns():
        other = found[name]
        assert (other.axis, other.dtype, other.trailing_shape) == (column.axis, column.dtype, column.trailing_shape)
        assert other.offsets.tolist() == column.offsets.tolist()
        if column.axis == "opaque":
            assert all(a is b for a, b in zip(other.values, column.values, strict=True))
        else:
            assert other.values.tobytes() == column.values.tobytes()


@pytest.mark.parametrize(("cp", "dp"), list(itertools.product([1, 2, 4], [1, 2, 3])))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_column_is_carried_to_the_bit(cp, dp, layout):
    batch = carried_batch()
    ranks = shard(batch, dp)
    returned = {}
    for indices in ranks:
        packed = pack(batch, indices)
        slices = [cp_slice(packed, cp, rank, layout) for rank in range(cp)]
        assert len({s.num_tokens for s in slices}) == 1
        back = unpack(join_slices(slices))
        assert_same(back, batch.select(indices))
        returned |= {b: back.select([i]) for i, b in enumerate(indices)}
    assert sorted(returned) == list(range(len(batch)))
    assert_same(concat(returned[b] for b in sorted(returned)), batch)


def test_values_stand_at_the_positions_of_their_tokens():
    batch = TrainBatch(
        columns={
            "tokens": Column.from_rows([[10, 11, 12, 13], [20, 21]], "token", "int64"),
            "loss_mask": Column.from_rows([[1, 0], [1]], "response"),
            "route": Column.from_rows([[[1], [2], [3]], [[4]]], "transition", "int32", (1,)),
            "reward": Column.from_rows([0.5, 1.5], "sample"),
        }
    )
    packed = pack(batch, [1, 0])
    assert packed["tokens"].values.tolist() == [20, 21, 10, 11, 12, 13]
    assert packed["loss_mask"].values.tolist() == [0, 1, 0, 0, 1, 0]
    assert packed["route"].values.tolist() == [[4], [0], [1], [2], [3], [0]]
    assert packed["reward"].values.tolist() == [1.5, 0.5]
    assert packed.cu_seqlens.tolist() == [0, 2, 6]
    assert packed.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert packed.sequence_ids.tolist() == [0, 0, 1, 1, 1, 1]
    with pytest.raises(KeyError, match="no column 'rewards'; it has loss_mask, reward, route, tokens"):
        packed["rewards"]


def test_a_rank_has_the_first_and_the_last_chunk_of_its_turn():
    batch = TrainBatch(
        columns={
            "tokens": Column.from_rows([list(range(1, 8)), [9]], "token", "int64"),
            "loss_mask": Column.from_rows([[1], [1]], "response"),
        }
    )
    packed = pack(batch, [0, 1])
    ranks = [cp_slice(packed, 2, rank) for rank in range(2)]
    assert [r["tokens"].values.tolist() for r in ranks] == [[1, 2, 7, 0, 9, 0], [3, 4, 5, 6, 0, 0]]
    assert [r.position_ids.tolist() for r in ranks] == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]
    assert [r.cu_seqlens.tolist() for r in ranks] == [[0, 4, 6], [0, 4, 6]]
    assert cp_slice(packed, 1, 0) is packed


def test_causal_work_is_even_over_context_parallel_ranks():
    batch = carried_batch(lengths=((64, 10), (32, 3)), trajectory=(0, 1))
    packed = pack(batch, [0, 1])
    work = [int((cp_slice(packed, 4, rank).position_ids + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1


def test_slices_that_do_not_belong_together_are_refused():
    packed = pack(carried_batch(), [0, 2])
    first, second = cp_slice(packed, 2, 0), cp_slice(packed, 2, 1)
    with pytest.raises(ValueError, match=r"it got 1 of 2 \(zigzag\), 0 of 2 \(zigzag\)"):
        join_slices([second, first])
    with pytest.raises(ValueError, match=r"0 of 2 \(zigzag\), 1 of 2 \(contiguous\)"):
        join_slices([first, cp_slice(packed, 2, 1, "contiguous")])
    with pytest.raises(ValueError, match="it got 0 of 2"):
        join_slices([first])
    with pytest.raises(ValueError, match="slice of context-parallel rank 1"):
        unpack(second)
    with pytest.raises(ValueError, match="cannot take slice 0 of 2 from slice 1 of 2"):
        cp_slice(second, 2, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 4),
    st.sampled_from(LAYOUTS),
)
def test_any_batch_is_split_and_carried_whole(samples, cp, dp, layout):
    lengths = [(t + r, r) for t, r, _ in samples]
    trajectory = [w for *_, w in samples]
    batch = carried_batch(lengths, trajectory)
    ranks = shard(batch, dp)
    assert sorted(itertools.chain(*ranks)) == list(range(len(batch)))
    for indices in ranks:
        packed = pack(batch, indices)
        assert_same(unpack(join_slices([cp_slice(packed, cp, r, layout) for r in range(cp)])), batch.select(indices))


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_a_rank_split_never_changes_group_statistics(dp):
    prompts, n = ["a", "b", "c", "d"], 2
    group = [g for g in range(len(prompts)) for _ in range(n)]
    reward = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.25, 0.5]
    lengths = [(6, 3), (9, 5), (4, 1), (20, 15), (5, 2), (5, 2), (7, 3), (8, 3)]
    batch = carried_batch(lengths, range(8)).with_columns(
        {
            "group_index": Column.from_rows(group, "sample", "int64"),
            "reward": Column.from_rows(reward, "sample"),
        }
    )

    def statistics(parts):
        found = {}
        for part in parts:
            for g, r in zip(part["group_index"].values.tolist(), part["reward"].values.tolist(), strict=True):
                found.setdefault(g, []).append(r)
        return {
            g: (len(rs), sum(rs) / len(rs), math.dist(rs, [sum(rs) / len(rs)] * len(rs))) for g, rs in found.items()
        }

    split = statistics(batch.select(indices) for indices in shard(batch, dp))
    assert split == statistics([batch])
    assert all(count == n for count, _, _ in split.values())


def test_a_metric_over_correct_samples_does_not_depend_on_the_split():
    batch = TrainBatch(
        columns={
            "tokens": Column.from_rows([[0] * t for t in (10, 20, 30, 40)], "token", "int64"),
            "loss_mask": Column.from_rows([[1] * t for t in (10, 20, 30, 40)], "response"),
            "reward": Column.from_rows([1, 0, 0, 1], "sample"),
        }
    )
    total = count = 0
    for indices in ([2, 0], [3, 1]):
        part = batch.select(indices)
        correct = part["reward"].values == 1
        total += int(part.response_lengths[correct].sum())
        count += int(correct.sum())
    assert (total / count, count) == (25, 2)
