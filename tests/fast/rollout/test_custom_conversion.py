from pathlib import Path

import numpy as np
import pytest

from miles.core.train_batch import Column
from miles.errors import HookError
from miles.rollout.custom_conversion import convert_by_hook
from tests.fast.rollout.test_train_data_conversion import make_sample, two_groups


def columns_of(samples, **more):
    plain = {
        "tokens": [s.tokens for s in samples],
        "loss_mask": [[1] * s.response_length for s in samples],
        "reward": [s.reward for s in samples],
    }
    return plain | more


def convert(fn, groups=None, require_rewards=True):
    return convert_by_hook(fn, "my.convert", groups or two_groups(), require_rewards=require_rewards)


def test_returned_columns_are_the_batch_and_what_names_the_samples_is_filled_in():
    batch = convert(columns_of)
    assert batch["tokens"].row(1).tolist() == [5, 6, 7, 7, 7]
    assert batch["reward"].values.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert batch["sample_index"].values.tolist() == [0, 1, 2, 3]
    assert batch["group_index"].values.tolist() == [0, 0, 1, 1]
    assert batch["trajectory"].values.tolist() == [0, 1, 2, 3]
    assert batch["weight_version"].values.tolist() == [3] * 4
    assert (batch["tokens"].dtype, batch["loss_mask"].dtype) == ("int64", "float32")


def test_the_function_gets_all_samples_in_order_and_fragments_stay_one_trajectory():
    seen = []

    def fn(samples):
        seen.extend(s.index for s in samples)
        return columns_of(samples)

    group = [[make_sample(0, 0, 1.0), make_sample(1, 0, 1.0)], make_sample(2, 0, 0.0)]
    assert convert(fn, [group])["trajectory"].values.tolist() == [0, 0, 1]
    assert seen == [0, 1, 2]


def test_names_of_other_programs_are_understood():
    def fn(samples):
        found = columns_of(samples)
        return {
            "tokens": found["tokens"],
            "loss_masks": found["loss_mask"],
            "rewards": found["reward"],
            "response_lengths": [2, 3, 2, 1],
            "sample_indices": [9, 8, 7, 6],
        }

    assert convert(fn)["sample_index"].values.tolist() == [9, 8, 7, 6]


def test_a_column_of_ones_own_keeps_its_axis():
    rows = [[[0.5, 0.5]] * n for n in (2, 3, 2, 1)]
    own = Column.from_rows(rows, "response", trailing_shape=(2,))
    batch = convert(lambda samples: columns_of(samples, top_k=own))
    assert batch.extra["top_k"].row(1).shape == (3, 2)


def test_supervised_samples_need_no_reward_column():
    plain = lambda samples: {k: v for k, v in columns_of(samples).items() if k != "reward"}  # noqa: E731
    assert "reward" not in convert(plain, require_rewards=False)
    with pytest.raises(HookError, match=r"my\.convert: returned no column 'reward'"):
        convert(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, r"column 'tokens' is NoneType, not a list"),
        ({"tokens": [[5]] * 3}, r"column 'tokens' has 3 rows for 4 samples"),
        ({"tokens": [[5, 6], ["a"], [5], [5]]}, r"column 'tokens' is \['a'\] for sample 1 \(group 0\)"),
        ({"tokens": [[5, 6], 7, [5], [5]]}, r"column 'tokens' is 7 for sample 1 \(group 0\), not a list"),
        (
            {"loss_mask": [[1, 1], [1, 1, float("nan")], [1, 1], [1]]},
            r"column 'loss_mask' holds NaN.*sample 1 \(group 0\)",
        ),
        ({"reward": [1.0, 0.0, float("inf"), 1.0]}, r"column 'reward' holds NaN or infinity for sample 2 \(group 1\)"),
        ({"reward": [1.0, 0.0, None, 1.0]}, r"column 'reward'.* for sample 2 \(group 1\)"),
        ({"reward": [1.0, 0.0, "good", 1.0]}, r"column 'reward' is 'good' for sample 2 \(group 1\)"),
        ({"rollout_log_probs": [[-1.0]] * 4}, r"column rollout_log_probs \(response axis\): sample 0 has 1 entries"),
        ({"advantage": [1.0] * 4}, r"column 'advantage' is list, and it is none of those"),
        ({"response_lengths": [2, 2, 2, 1]}, r"column 'response_lengths' has \[2\] for sample 1 \(group 0\)"),
        ({"rewards": [1.0] * 4}, r"returned the column 'reward' under two names"),
        ({3: [1.0] * 4}, r"returned a column named 3"),
        (
            {"reward": Column.from_rows([[1.0], [1.0] * 2, [1.0], [1.0]], "response")},
            r"column 'reward' has the axis response, not sample",
        ),
    ],
)
def test_a_wrong_column_is_named_with_its_first_sample(change, message):
    with pytest.raises(HookError, match=r"my\.convert: " + message):
        convert(lambda samples: {**columns_of(samples), **change})


def test_a_function_that_fails_or_returns_no_columns_is_named():
    with pytest.raises(HookError, match=r"my\.convert: raised ZeroDivisionError.*\n    at .*1 // 0"):
        convert(lambda samples: 1 // 0)
    with pytest.raises(HookError, match=r"my\.convert: returned list"):
        convert(lambda samples: [])


def test_arrays_are_rows_too():
    batch = convert(lambda samples: columns_of(samples, reward=np.asarray([0.5, 1.5, 2.5, 3.5])))
    assert batch["reward"].values.tolist() == [0.5, 1.5, 2.5, 3.5]


def test_the_example_of_the_page_is_a_batch():
    page = (Path(__file__).resolve().parents[3] / "docs" / "user-guide" / "customization.md").read_text(
        encoding="utf-8"
    )
    section = page[page.index("## Columns of the train batch") :]
    names: dict = {}
    exec(section.split("```python\n", 1)[1].split("```", 1)[0], names)
    groups = [[make_sample(0, 0, 1.0, response=10), make_sample(1, 0, 0.0)]]
    groups[0][0].metadata["difficulty"] = 0.5
    batch = convert(lambda samples: names["convert"](None, samples), groups)
    assert batch["loss_mask"].row(0).tolist() == [0.0, 0.0] + [1.0] * 8
    assert batch.extra["difficulty"].values.tolist() == [0.5, 0.0]
