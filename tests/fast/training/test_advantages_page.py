import re
from pathlib import Path

import numpy as np
import torch

from miles.backends.training_utils.advantages import AdvantageInputs, CustomAdvantages
from miles.config.estimators import ESTIMATORS
from miles.config.schema import RunConfig
from miles.config.walk import leaves
from miles.rollout.reward_normalization import normalize_group

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## Advantage estimators") : PAGE.index("## Losses")]


def rows(heading):
    """Cells of the table whose first column is called `heading`."""
    table = SECTION[SECTION.index(f"\n\n| {heading} |") + 2 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_estimators_is_the_codes():
    words = {True: "yes", False: "no"}
    assert [row[:6] for row in rows("name")] == [
        [
            name,
            facts.baseline or "none",
            words[facts.uses_kl],
            words[facts.discounts],
            words[facts.needs_values],
            words[facts.must_whiten],
        ]
        for name, facts in ESTIMATORS.items()
    ]


def test_the_example_of_baselines_is_what_the_code_gives():
    for baseline, _, right, wrong in rows("baseline"):
        got = normalize_group([1, 1, 1, 0, 0, 0, 0, 0], baseline)
        np.testing.assert_allclose([got[0], got[-1]], [float(right), float(wrong)], atol=5e-5)


def test_every_estimator_has_its_formula_its_paper_and_when_to_use_it():
    for name in ESTIMATORS:
        part = re.split(r"\n###? ", SECTION.split(f": `{name}`\n", 1)[1])[0]
        assert "A_t" in part
        assert "*When:*" in part
        assert "*Flags:*" in part
        assert "arXiv:" in part or "The same paper." in part


def test_flags_that_the_page_names_exist():
    known = {"--dry-run", *(flag for leaf in leaves(RunConfig) for flag in (*leaf.flags, *leaf.inverted))}
    assert set(re.findall(r"--[a-z0-9][a-z0-9-]+", SECTION)) - known == set()


def test_the_example_of_an_own_function_runs():
    namespace = {}
    exec(SECTION.split("```python\n", 1)[1].split("```", 1)[0], namespace)
    custom = CustomAdvantages(fn=namespace["advantages"], args=None, path="example")
    batch = AdvantageInputs(
        rewards_B=torch.tensor([1.0, 3.0, 2.0]),
        trajectory_B=torch.arange(3),
        group_B=torch.zeros(3, dtype=torch.int64),
        sample_index_B=torch.arange(3),
        sample_of_R=torch.tensor([0, 0, 2]),
        mask_R=torch.ones(3),
    )
    assert custom(batch).advantages_R.tolist() == [0.5, 0.5, 2.0]
