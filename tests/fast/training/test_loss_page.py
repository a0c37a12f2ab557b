import re
from pathlib import Path
from typing import get_args

from miles.backends.training_utils.loss_hub.corrections import PRESETS
from miles.backends.training_utils.loss_hub.kl import KlKind
from miles.backends.training_utils.loss_hub.objectives import OBJECTIVES, OF_SEQUENCES
from miles.config import objectives
from miles.config.walk import leaves

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## Losses") :]


def rows(heading):
    """Cells of the table whose first column is called `heading`."""
    table = SECTION[SECTION.index(f"\n\n| `{heading}` |") + 2 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_objectives_is_the_codes():
    table = rows("--policy-objective")
    assert [row[0] for row in table] == list(OBJECTIVES) == list(get_args(objectives.ObjectiveName))
    assert {row[0] for row in table if row[-1] == "a trajectory"} == OF_SEQUENCES
    assert {row[1]: row[0] for row in table if row[1] != "all others"} == objectives.OBJECTIVES


def test_the_table_of_corrections_is_the_codes():
    table = {row[0]: row[2:5] for row in rows("--correction-preset")}
    assert list(table) == list(PRESETS)
    for name, (weighting, rejection) in PRESETS.items():
        level, mode, bounds = table[name]
        rule = weighting or rejection
        assert level == (rule.level if rule else "")
        assert mode == (weighting.mode if weighting else "")
        if rule:
            upper = "" if rule.upper is None else f" to {rule.upper:g}"
            assert bounds == (f"{rule.lower:g}{upper}" if upper else f"from {rule.lower:g}")


def test_the_tables_of_denominators_and_kl_name_every_choice():
    assert [row[0] for row in rows("--loss-denominator")] == list(get_args(objectives.DenominatorName))
    assert [row[0] for row in rows("--kl-loss-type")] == list(get_args(KlKind))
    for estimator, kind in objectives.DENOMINATORS.items():
        assert re.search(rf"`{kind}`\s+comes\s+with\s+`{estimator}`", SECTION)


def test_flags_and_settings_on_the_page_exist():
    known = {flag for leaf in leaves() for flag in (*leaf.flags, *leaf.inverted)}
    assert set(re.findall(r"--[a-z][a-z0-9-]+", SECTION)) <= known
    paths = {leaf.path for leaf in leaves()}
    assert set(re.findall(r"`((?:ci|train|correction|algorithm)\.[a-z_]+)`", SECTION)) <= paths
