import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "ray", "transformers", "sglang")


def test_the_core_loads_without_heavy_packages():
    code = (
        "import sys, pkgutil, importlib, miles.core\n"
        "for m in pkgutil.iter_modules(miles.core.__path__): importlib.import_module('miles.core.' + m.name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
