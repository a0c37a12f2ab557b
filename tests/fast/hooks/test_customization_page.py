import io
import json
import re
import sys
from pathlib import Path

import pytest

from miles.config.schema import RunConfig
from miles.core.hook_contracts import GROUP_REWARD, HOOKS
from miles.hooks.child import run_tests
from miles.hooks.findings import Report
from miles.hooks.options import read_check
from tests.fast.rollout.support import make_model_folder

PAGE = (Path(__file__).parents[3] / "docs/user-guide/customization.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
FUNCTIONS = {
    "score": "--custom-rm-path",
    "keep_mixed": "--dynamic-sampling-filter-path",
    "convert": "--custom-convert-samples-to-train-data-path",
    "log": "--custom-rollout-log-function-path",
    "keep_answer": "--rollout-sample-hook-path",
    "generate": "--custom-generate-function-path",
}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's functions in one module."""
    (tmp_path / "page_hooks.py").write_text("\n\n".join(SNIPPETS), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "page_hooks"
    sys.modules.pop("page_hooks", None)


@pytest.mark.parametrize(("name", "flag"), FUNCTIONS.items())
def test_every_function_of_the_page_passes_its_contract_tests(page, tmp_path, name, flag):
    config = RunConfig.model_validate(
        {
            "custom": {"length_penalty": 0.001},
            "model": {"hf_checkpoint": str(make_model_folder(tmp_path / "model"))},
        }
    )
    file = io.StringIO()
    run_tests({"path": f"{page}.{name}", "flag": flag, "samples": None, "timeout_s": 20.0}, config, Report(file))
    found = [json.loads(line).get("finding") for line in file.getvalue().splitlines()]
    assert [f for f in found if f and f["verdict"] in ("FAILS", "not run")] == []
    assert sum(f is not None for f in found) > 4
    told = ["--as", flag] if name == "convert" else []  # `fn(args, samples)` is the form of several hooks
    assert read_check([f"{page}.{name}", *told]).flag == flag


def test_every_function_of_the_page_is_among_those_that_are_tried(page):
    assert set(re.findall(r"^(?:async )?def (\w+)", "\n".join(SNIPPETS), flags=re.MULTILINE)) == set(FUNCTIONS)


def test_the_table_of_the_page_has_every_hook():
    missing = [flag for flag in HOOKS if flag != GROUP_REWARD and f"| `{flag}`" not in PAGE]
    assert missing == []
