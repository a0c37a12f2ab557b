import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
LAYERS = SETTINGS["contracts"][0]["layers"]


def lint(folder, *arguments):
    code = "import sys; from importlinter.cli import lint_imports_command as c; c()"
    command = [sys.executable, "-c", code, "--no-cache", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def rooms():
    return [name.strip(" ()") for layer in LAYERS for name in layer.split("|")]


def test_imports_point_down():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_module_has_a_room():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "miles").rglob("*.py")
        if path.name != "__init__.py"
    }
    strays = sorted(m for m in modules if not any(m == room or m.startswith(room + ".") for room in rooms()))
    assert strays == [], "place these in the layers of pyproject.toml"


def test_the_order_is_that_of_the_architecture():
    names = [[n.strip(" ()").removeprefix("miles.") for n in layer.split("|")] for layer in LAYERS]
    assert names == [
        ["cli"],
        ["data_check", "doctor", "hooks", "parity", "reward_check", "verify_resume"],
        ["launch"],
        ["ray"],
        [
            "backends.megatron_utils",
            "backends.fsdp_utils",
            "backends.sglang_utils",
            "backends.torch_engine",
            "rollout",
            "router",
            "dashboard",
        ],
        ["backends.weight_sync"],
        ["backends.training_utils"],
        ["true_on_policy"],
        ["core"],
        ["config"],
        ["utils"],
        ["errors"],
    ]


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("miles/core/up.py", "import miles.rollout", "Imports point down BROKEN"),
        ("miles/rollout/sideways.py", "import miles.router", "Imports point down BROKEN"),
        ("miles/config/heavy.py", "import torch", "without torch, ray, transformers or sglang BROKEN"),
        ("miles/core/indirect.py", "import miles.utils.heavy", "without torch, ray, transformers or sglang BROKEN"),
        ("miles/utils/plugin.py", "import miles_plugins", "Plug-ins are loaded by path, never imported BROKEN"),
    ],
)
def test_an_import_that_points_up_or_sideways_is_found(tmp_path, module, line, broken):
    for room in ("core", "config", "utils", "rollout", "router"):
        folder = tmp_path / "miles" / room
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    for file in ("miles/__init__.py", "miles/errors.py", "miles_plugins/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "miles/utils/heavy.py").write_text("import torch\n")
    (tmp_path / module).write_text(line + "\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = lint(tmp_path)
    assert done.returncode == 1
    assert broken in done.stdout
    assert done.stdout.count("BROKEN") == 1
