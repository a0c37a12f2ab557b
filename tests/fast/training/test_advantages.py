import dataclasses
import math
import random
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.advantages import ADVANTAGES, AdvantageInputs, CustomAdvantages, compute_advantages
from miles.backends.training_utils.advantages.rloo import leave_one_out
from miles.config.estimators import ESTIMATORS, EstimatorName
from miles.errors import HookError, TrainingError

NAMES = list(ADVANTAGES)
FORMULAS = ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
"""One name of each formula."""
LIKE_GRPO = ["grpo", "gspo", "dr_grpo", "dapo", "cispo", "sapo", "gmpo", "dppo"]


def inputs(rewards, masks, *, trajectories=None, groups=None, kl=None, values=None, dtype=torch.float64, **scalars):
    """A batch from one row per sample."""
    count = len(rewards)

    def flat(rows):
        return None if rows is None else torch.tensor([x for row in rows for x in row], dtype=dtype)

    return AdvantageInputs(
        rewards_B=torch.tensor(rewards, dtype=dtype),
        trajectory_B=torch.tensor(list(range(count)) if trajectories is None else trajectories),
        group_B=torch.tensor([0] * count if groups is None else groups),
        sample_index_B=torch.arange(100, 100 + count),
        sample_of_R=torch.tensor([b for b, row in enumerate(masks) for _ in row], dtype=torch.int64),
        mask_R=flat(masks),
        kl_R=flat(kl),
        values_R=flat(values),
        **scalars,
    )


def run(name, batch, normalize=False):
    return compute_advantages(ADVANTAGES[name], batch, normalize=normalize).advantages_R.tolist()


@st.composite
def batches(draw):
    """Rows of samples with siblings, several groups, masks that may be 0 everywhere, divergences and values."""
    finite = st.floats(-3, 3)
    rows = []
    for trajectory in range(draw(st.integers(1, 5))):
        group, reward = draw(st.integers(0, 2)), draw(finite)
        for _ in range(draw(st.integers(1, 3))):
            length = draw(st.integers(0, 5))
            mask, kl, values = (
                draw(st.lists(kind, min_size=length, max_size=length))
                for kind in (st.sampled_from([0.0, 1.0]), finite, finite)
            )
            rows.append({"trajectory": trajectory, "group": group, "reward": reward, "m": mask, "kl": kl, "v": values})
    scalars = {"gamma": draw(st.sampled_from([0.0, 0.5, 1.0])), "lam": draw(st.sampled_from([0.0, 0.9, 1.0]))}
    return rows, {**scalars, "kl_coef": draw(st.sampled_from([0.0, 0.3]))}


def built(rows, scalars):
    return inputs(
        [row["reward"] for row in rows],
        [row["m"] for row in rows],
        trajectories=[row["trajectory"] for row in rows],
        groups=[row["group"] for row in rows],
        kl=[row["kl"] for row in rows],
        values=[row["v"] for row in rows],
        **scalars,
    )


def reference(name, rows, gamma, lam, kl_coef):
    """Advantages of every token, by rows, as the papers write them: scalars, loops, float64."""
    steps = {}  # trajectory -> its trainable tokens in order, as (row, column)
    for i, row in enumerate(rows):
        steps.setdefault(row["trajectory"], []).extend((i, j) for j, m in enumerate(row["m"]) if m)
    steps = {t: tokens for t, tokens in steps.items() if tokens}
    out = [[0.0] * len(row["m"]) for row in rows]
    for tokens in steps.values():
        first = rows[tokens[0][0]]
        cost = [kl_coef * rows[i]["kl"][j] for i, j in tokens]
        value = [rows[i]["v"][j] for i, j in tokens] + [0.0]
        others = [u for u in steps.values() if rows[u[0][0]]["group"] == first["group"] and u is not tokens]
        if name == "rloo":
            theirs = [sum(kl_coef * rows[i]["kl"][j] for i, j in u) for u in others]
            own = sum(cost) - sum(theirs) / len(theirs) if theirs else 0.0
        carried = 0.0
        for k in reversed(range(len(tokens))):
            i, j = tokens[k]
            last = first["reward"] if k == len(tokens) - 1 else 0.0
            if name == "reinforce_plus_plus":
                carried = out[i][j] = last - cost[k] + gamma * carried
            elif name == "ppo":
                carried = out[i][j] = last - cost[k] + gamma * value[k + 1] - value[k] + gamma * lam * carried
            elif name == "reinforce_plus_plus_baseline":
                out[i][j] = first["reward"] - cost[k]
            else:
                out[i][j] = first["reward"] - (own if name == "rloo" else 0.0)
    return [x for row in out for x in row]


def close(got, expected):
    torch.testing.assert_close(
        torch.tensor(got, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9
    )


# Formulas


@pytest.mark.parametrize("name", FORMULAS)
@settings(deadline=None, max_examples=60)
@given(batches())
def test_every_estimator_is_its_papers_formula(name, drawn):
    rows, scalars = drawn
    close(run(name, built(rows, scalars)), reference(name, rows, **scalars))


def test_the_mean_of_the_others_is_taken_in_float64():
    found = leave_one_out(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    assert found.tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-15)


@pytest.mark.parametrize("name", LIKE_GRPO)
def test_estimators_that_differ_in_the_loss_give_every_token_its_samples_reward(name):
    assert ADVANTAGES[name] is ADVANTAGES["grpo"]
    batch = inputs([1.2076, -0.7246], [[1, 1], [1, 0, 1]])
    assert run(name, batch) == [1.2076, 1.2076, -0.7246, 0.0, -0.7246]


# Case B06.
def test_rewards_reach_tokens_before_an_observation_with_one_decay_per_trainable_token():
    assert run("reinforce_plus_plus", inputs([1.0], [[1, 0, 1]], gamma=0.5)) == [0.5, 0.0, 1.0]


# Case B07.
def test_gae_runs_over_trainable_tokens_and_the_reward_is_at_the_last_of_them():
    batch = inputs([1.0], [[1, 1, 0, 0]], values=[[0, 0, 9, 9]], gamma=0.9, lam=1.0)
    close(run("ppo", batch), [0.9, 1.0, 0.0, 0.0])
    batch = dataclasses.replace(batch, gamma=0.0)
    close(run("ppo", batch), [0.0, 1.0, 0.0, 0.0])


def test_gae_golden_numbers():
    batch = inputs([1.0], [[1, 1, 1]], values=[[0.5, 0.4, 0.3]], gamma=0.9, lam=0.8)
    output = compute_advantages(ADVANTAGES["ppo"], batch, normalize=False)
    # errors: 0.9*0.4-0.5 = -0.14, 0.9*0.3-0.4 = -0.13, 1-0.3 = 0.7; decay 0.72
    close(output.advantages_R.tolist(), [-0.14 + 0.72 * (-0.13 + 0.72 * 0.7), -0.13 + 0.72 * 0.7, 0.7])
    close(output.returns_R.tolist(), [0.62928, 0.774, 1.0])


def test_with_gamma_and_lambda_one_gae_is_the_reward_minus_the_value():
    batch = inputs([2.0], [[1, 0, 1, 1]], values=[[0.5, 7.0, 0.4, 0.3]])
    close(run("ppo", batch), [1.5, 0.0, 1.6, 1.7])


def test_rloo_compares_the_divergence_with_the_others_of_the_prompt():
    batch = inputs(
        [0.5, -0.5, 0.0, 0.0],
        [[1, 1], [1], [0], [1]],
        groups=[0, 0, 0, 1],
        kl=[[1.0, 1.0], [1.0], [50.0], [3.0]],
        kl_coef=0.1,
    )
    close(run("rloo", batch), [0.4, 0.4, -0.4, 0.0, 0.0])


def test_the_divergence_comes_off_token_by_token():
    batch = inputs([1.0], [[1, 1, 1]], kl=[[0.1, 0.2, 0.3]], kl_coef=0.5)
    close(run("reinforce_plus_plus", batch), [0.7, 0.75, 0.85])
    close(run("reinforce_plus_plus_baseline", batch), [0.95, 0.9, 0.85])


def test_a_divergence_that_no_coefficient_asks_for_is_not_read():
    batch = inputs([1.0], [[1, 1]], kl=[[math.nan, math.inf]])
    assert run("reinforce_plus_plus", batch) == [1.0, 1.0]


# Invariances


@pytest.mark.parametrize("name", FORMULAS)
@settings(deadline=None, max_examples=40)
@given(batches(), st.integers(0, 1000), st.booleans())
def test_the_order_of_trajectories_and_groups_does_not_matter(name, drawn, seed, normalize):
    rows, scalars = drawn
    normalize = normalize and any(any(row["m"]) for row in rows)
    order = random.Random(seed).sample(
        sorted({row["trajectory"] for row in rows}), len({r["trajectory"] for r in rows})
    )
    moved = [row for t in order for row in rows if row["trajectory"] == t]

    def by_row(some):
        flat = iter(run(name, built(some, scalars), normalize))
        return {id(row): [next(flat) for _ in row["m"]] for row in some}

    before, after = by_row(rows), by_row(moved)
    for key, tokens in before.items():
        close(after[key], tokens)


@pytest.mark.parametrize("name", FORMULAS)
@settings(deadline=None, max_examples=40)
@given(batches(), st.data(), st.booleans())
def test_splitting_a_trajectory_over_more_samples_does_not_matter(name, drawn, data, normalize):
    rows, scalars = drawn
    normalize = normalize and any(any(row["m"]) for row in rows)
    parts = []
    for row in rows:
        cut = data.draw(st.integers(0, len(row["m"])))
        parts += [{**row, **{k: row[k][s] for k in ("m", "kl", "v")}} for s in (slice(cut), slice(cut, None))]
    close(run(name, built(parts, scalars), normalize), run(name, built(rows, scalars), normalize))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_what_stands_at_masked_tokens_changes_no_bit(name, normalize, poison):
    masks = [[1, 0, 1], [0, 1, 0], [0, 0]]

    def batch(x, rejected):
        kl = [[0.1, x, 0.2], [x, 0.3, x], [x, x]]
        values = [[0.5, x, 0.4], [x, 0.1, x], [x, x]]
        return inputs([1.0, 0.25, rejected], masks, kl=kl, values=values, gamma=0.9, lam=0.8, kl_coef=0.1)

    assert run(name, batch(poison, poison), normalize) == run(name, batch(0.0, 0.0), normalize)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_masked_tokens_and_rejected_samples_have_advantage_zero(name, normalize):
    masks = [[1, 0], [0, 0], [0, 1]]
    batch = inputs([1.0, 5.0, 2.0], masks, kl=masks, values=masks, kl_coef=0.1)
    got = run(name, batch, normalize)
    assert [got[r] for r in (1, 2, 3, 4)] == [0.0] * 4


@pytest.mark.parametrize("name", FORMULAS)
def test_a_batch_of_which_nothing_is_trained_on_gives_zeros(name):
    batch = inputs([1.0, 0.0], [[0, 0], []], kl=[[1, 1], []], values=[[1, 1], []], kl_coef=0.1)
    assert run(name, batch) == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [n for n in FORMULAS if n != "ppo"])
def test_equal_rewards_give_exactly_zero_after_whitening(name, dtype):
    batch = inputs([0.1] * 5, [[1, 1, 0]] * 5, dtype=dtype)
    assert run(name, batch, normalize=True) == [0.0] * 15


def test_whitening_counts_tokens_and_leaves_returns_alone():
    batch = inputs([1.0, 0.0], [[1, 1, 1], [1]], values=[[0.0] * 3, [0.0]])
    plain = compute_advantages(ADVANTAGES["ppo"], batch, normalize=False)
    white = compute_advantages(ADVANTAGES["ppo"], batch, normalize=True)
    close(white.advantages_R.tolist(), [0.5, 0.5, 0.5, -1.5])
    assert white.returns_R.tolist() == plain.returns_R.tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", FORMULAS)
def test_single_precision_agrees_with_double(name):
    masks = [[1, 1, 0, 1], [1, 1]]
    some = {"kl": [[0.1, 0.2, 9, 0.3], [0.1, 0.1]], "values": [[0.5, 0.4, 9, 0.3], [0.2, 0.1]]}
    batches = [
        inputs([1.0, 0.3], masks, **some, gamma=0.9, lam=0.8, kl_coef=0.1, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    ]
    single, double = (compute_advantages(ADVANTAGES[name], b, normalize=False).advantages_R for b in batches)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=1e-6)


# What must not be trained on


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("column", "name"), [("reward", "grpo"), ("the divergence from the reference model", "rloo"), ("values", "ppo")]
)
def test_a_broken_number_is_an_error_that_names_sample_and_column(column, name, bad):
    rows = [[0.1, 0.2], [0.3, bad]]
    fine = [[0.0, 0.0]] * 2
    batch = inputs(
        [1.0, bad if column == "reward" else 0.0],
        [[1, 1]] * 2,
        kl=rows if "divergence" in column else fine,
        values=rows if column == "values" else fine,
        kl_coef=0.1,
    )
    with pytest.raises(TrainingError, match=rf"{column} is {bad}.*samples 101\n.*fix"):
        run(name, batch)


def test_an_advantage_that_overflows_is_an_error_that_names_the_sample():
    batch = inputs([0.0, 3e38], [[1], [1, 1]], values=[[0.0], [-3e38, 0.0]], dtype=torch.float32)
    with pytest.raises(TrainingError, match=r"the advantage is inf.*samples 101"):
        run("ppo", batch)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo"])
def test_parts_of_one_trajectory_with_different_rewards_are_refused_where_only_one_is_given(name):
    batch = inputs([1.0, 0.5, 0.0], [[1]] * 3, trajectories=[4, 4, 5], values=[[0.0]] * 3)
    with pytest.raises(TrainingError, match=r"samples 100, 101 are one trajectory.*\n.*same reward"):
        run(name, batch)


def test_ppo_without_values_is_an_error_with_the_way_out():
    with pytest.raises(TrainingError, match=r"no column values\n.*critic.*reinforce_plus_plus"):
        run("ppo", inputs([1.0], [[1]]))


# The table


def test_every_formula_is_tested_once_under_a_name_of_its_own():
    assert {ADVANTAGES[name] for name in FORMULAS} == set(ADVANTAGES.values())
    assert len({ADVANTAGES[name] for name in FORMULAS}) == len(FORMULAS)


def test_facts_formulas_and_the_setting_have_the_same_names():
    assert list(ADVANTAGES) == list(ESTIMATORS) == list(get_args(EstimatorName))


@pytest.mark.parametrize("name", NAMES)
def test_facts_say_what_a_formula_reads(name):
    masks, some = [[1, 1], [1, 1]], {"kl": [[0.1, 0.2], [0.4, 0.9]], "values": [[0.1, 0.4], [0.2, 0.3]]}
    base = {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1}
    facts = ESTIMATORS[name]

    def changes(**other):
        return run(name, inputs([1.0, 0.0], masks, **some, **{**base, **other})) != run(
            name, inputs([1.0, 0.0], masks, **some, **base)
        )

    assert changes(kl_coef=0.2) == facts.uses_kl
    assert changes(gamma=0.7) == facts.discounts
    assert changes(lam=0.5) == facts.needs_values


# A user's own


def custom(fn, batch, normalize=False, **columns):
    return compute_advantages(
        CustomAdvantages(fn=fn, args="args", path="my.fn", columns=columns), batch, normalize=normalize
    )


def test_a_users_function_gets_the_whole_batch_and_sets_advantages_and_returns_in_it():
    seen = {}

    def fn(args, rollout_data):
        seen.update(rollout_data, args=args)
        rows = [
            torch.full((n,), r) for n, r in zip(rollout_data["response_lengths"], rollout_data["rewards"], strict=True)
        ]
        rollout_data["advantages"] = rows
        rollout_data["returns"] = [row.tolist() for row in rows]
        rollout_data["loss_masks"][0][0] = 0

    batch = inputs(
        [2.0, 1.0, 3.0], [[1, 0], [], [1]], trajectories=[0, 1, 1], groups=[5, 6, 6], values=[[4, 5], [], [6]]
    )
    output = custom(fn, batch, log_probs=torch.tensor([-1.0, -2.0, -3.0]))
    assert output.advantages_R.tolist() == output.returns_R.tolist() == [2.0, 0.0, 3.0]
    assert (seen["args"], seen["rewards"], seen["response_lengths"]) == ("args", [2.0, 1.0, 3.0], [2, 0, 1])
    assert (seen["rollout_ids"], seen["group_indices"], seen["sample_indices"]) == (
        [0, 1, 1],
        [5, 6, 6],
        [100, 101, 102],
    )
    assert [row.tolist() for row in seen["log_probs"]] == [[-1.0, -2.0], [], [-3.0]]
    assert [row.tolist() for row in seen["values"]] == [[4.0, 5.0], [], [6.0]]
    assert "kl" not in seen
    assert batch.mask_R.tolist() == [1.0, 0.0, 1.0]


def test_a_users_advantages_are_whitened_too():
    def fn(args, rollout_data):
        rollout_data["advantages"] = [[1.0, 99.0], [3.0]]

    close(
        custom(fn, inputs([0.0, 0.0], [[1, 0], [1]]), normalize=True).advantages_R.tolist(), [-(0.5**0.5), 0, 0.5**0.5]
    )


def _sets(value):
    return lambda args, rollout_data: rollout_data.update(advantages=value)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda args, rollout_data: None, r"my.fn: did not set rollout_data\['advantages'\]"),
        (_sets([[1.0, 1.0]]), "set 1 rows of advantages for 2 samples"),
        (
            _sets([[1.0, 1.0], [1.0, 1.0]]),
            r"set advantages of shape \[2\] for sample 101, whose response has 1 tokens",
        ),
        (_sets([[1.0, 1.0], 1.0]), r"set advantages of shape \[\] for sample 101"),
        (_sets([["a", "b"], [1.0]]), r"set rollout_data\['advantages'\] to something else"),
        (_sets(3.0), r"set rollout_data\['advantages'\] to something else"),
        (lambda args, rollout_data: rollout_data["nothing"], "failed with KeyError: 'nothing'"),
    ],
)
def test_a_users_function_that_sets_something_else_is_told_so(fn, message):
    with pytest.raises(HookError, match=message) as caught:
        custom(fn, inputs([1.0, 0.0], [[1, 1], [1]]))
    assert "def fn(args, rollout_data)" in str(caught.value)


def test_a_users_broken_number_names_the_sample():
    with pytest.raises(TrainingError, match=r"the advantage is nan.*samples 101"):
        custom(_sets([[1.0, 1.0], [math.nan]]), inputs([1.0, 0.0], [[1, 1], [1]]))
