from pathlib import Path

import pytest

from tests.ci.collect import Registration, RegistrationError, collect
from tests.ci.register import SUITES

ROOT = Path(__file__).resolve().parents[3]
IMPORT = "from tests.ci.register import register_cpu_ci, register_cuda_ci\n"
E2E = "tests/e2e/test_whole.py"
GPU = "tests/fast-gpu/test_kernel.py"
FAST = "tests/fast/data/test_rows.py"
SUITE_NAMES = "stage-a-cpu, stage-b-cpu, stage-b-1-gpu-h200, stage-c-2-gpu-h200"
QUICK_TEST = "def test_a(): pass\n"
SLOW_TEST = "@pytest.mark.slow\ndef test_b(): pass\n"


def tree(root, modules):
    for name, source in modules.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def issues(root, modules):
    with pytest.raises(RegistrationError) as caught:
        collect(tree(root, modules))
    return list(caught.value.issues)


WRONG = {
    "no suite": (
        E2E,
        "x = 1\n",
        'no suite runs this module. Fix: after its imports write register_cpu_ci(est_time=60, suite="stage-b-cpu"), '
        "with the seconds it takes",
    ),
    "no suite, GPU": (
        GPU,
        "x = 1\n",
        "no suite runs this module. Fix: after its imports write "
        'register_cuda_ci(est_time=60, suite="stage-b-1-gpu-h200"), with the seconds it takes',
    ),
    "a name for a value": (
        E2E,
        'register_cpu_ci(est_time=HOUR, suite="stage-b-cpu")',
        "register_cpu_ci: est_time=HOUR is no literal. Fix: write the value itself, as in "
        'register_cpu_ci(est_time=60, suite="stage-a-cpu"): the module is not run',
    ),
    "a sum for a value": (
        GPU,
        'register_cuda_ci(est_time=60 * 2, suite="stage-b-1-gpu-h200")',
        "register_cuda_ci: est_time=60 * 2 is no literal. Fix: write the value itself, as in "
        'register_cuda_ci(est_time=60, suite="stage-b-1-gpu-h200"): the module is not run',
    ),
    "values from a mapping": (
        E2E,
        "register_cpu_ci(**VALUES)",
        "register_cpu_ci: **VALUES is no literal. Fix: write the value itself, as in "
        'register_cpu_ci(est_time=60, suite="stage-a-cpu"): the module is not run',
    ),
    "no names": (
        E2E,
        'register_cpu_ci(60, "stage-b-cpu")',
        "register_cpu_ci has values without a name. Fix: name each, as in "
        'register_cpu_ci(est_time=60, suite="stage-a-cpu")',
    ),
    "a suite that is not there": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-b-cpus")',
        f"register_cpu_ci: there is no suite 'stage-b-cpus'. Fix: did you mean stage-b-cpu? There are {SUITE_NAMES}",
    ),
    "a suite like no other": (
        E2E,
        'register_cpu_ci(est_time=60, suite="weekly")',
        f"register_cpu_ci: there is no suite 'weekly'. Fix: there are {SUITE_NAMES}",
    ),
    "GPUs in a call for CPUs": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-c-2-gpu-h200")',
        "register_cpu_ci: stage-c-2-gpu-h200 is a suite of GPUs. Fix: write register_cuda_ci, or one of "
        "stage-a-cpu, stage-b-cpu",
    ),
    "CPUs in a call for GPUs": (
        GPU,
        'register_cuda_ci(est_time=60, suite="stage-b-cpu")',
        "register_cuda_ci: stage-b-cpu is a suite of CPUs. Fix: write register_cpu_ci, or one of "
        "stage-b-1-gpu-h200, stage-c-2-gpu-h200",
    ),
    "a misspelt setting": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-b-cpu", nightli=True)',
        "register_cpu_ci: there is no nightli. Fix: write nightly",
    ),
    "an unknown setting": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-b-cpu", gpus=2)',
        "register_cpu_ci: there is no gpus. Fix: there are est_time, suite, labels, nightly, disabled",
    ),
    "no time": (
        E2E,
        'register_cpu_ci(suite="stage-b-cpu")',
        "register_cpu_ci: est_time is None. Fix: write the seconds the module takes, as in est_time=60",
    ),
    "time zero": (
        E2E,
        'register_cpu_ci(est_time=0, suite="stage-b-cpu")',
        "register_cpu_ci: est_time is 0. Fix: write the seconds the module takes, as in est_time=60",
    ),
    "labels in one word": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-b-cpu", labels="weights")',
        "register_cpu_ci: labels is 'weights'. Fix: write words, as in labels=[\"weights\"]",
    ),
    "nightly in words": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-b-cpu", nightly="yes")',
        "register_cpu_ci: nightly is 'yes'. Fix: write True or False",
    ),
    "disabled without a reason": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-b-cpu", disabled=True)',
        'register_cpu_ci: disabled is True. Fix: write the reason, as in disabled="engine 0.6 answers 500, issue 31"',
    ),
    "disabled with an empty reason": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-b-cpu", disabled=" ")',
        "register_cpu_ci: disabled is ' '. Fix: write the reason, as in disabled=\"engine 0.6 answers 500, issue 31\"",
    ),
    "in a condition": (
        E2E,
        'if x: register_cpu_ci(est_time=60, suite="stage-b-cpu")',
        "register_cpu_ci is called, but not at module level as a line of its own. Fix: write register_cpu_ci(...) "
        "unindented, outside of functions, classes and conditions",
    ),
    "in a function": (
        GPU,
        'def setup(): register_cuda_ci(est_time=60, suite="stage-b-1-gpu-h200")',
        "register_cuda_ci is called, but not at module level as a line of its own. Fix: write register_cuda_ci(...) "
        "unindented, outside of functions, classes and conditions",
    ),
    "its result kept": (
        E2E,
        'x = register_cpu_ci(est_time=60, suite="stage-b-cpu")',
        "register_cpu_ci is called, but not at module level as a line of its own. Fix: write register_cpu_ci(...) "
        "unindented, outside of functions, classes and conditions",
    ),
    "through its module": (
        E2E,
        'register.register_cpu_ci(est_time=60, suite="stage-b-cpu")',
        "register_cpu_ci is called, but not at module level as a line of its own. Fix: write register_cpu_ci(...) "
        "unindented, outside of functions, classes and conditions",
    ),
    "under another name": (
        E2E,
        "from tests.ci.register import register_cpu_ci as on_cpu",
        "register_cpu_ci under the name on_cpu cannot be found in the source. Fix: write "
        "from tests.ci.register import register_cpu_ci",
    ),
    "twice": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-b-cpu"); register_cpu_ci(est_time=9, suite="stage-b-cpu")',
        "a second register_cpu_ci, after that of line 2. Fix: keep one",
    ),
    "e2e in the fast suite": (
        E2E,
        'register_cpu_ci(est_time=60, suite="stage-a-cpu")',
        'a module of tests/e2e in stage-a-cpu. Fix: write suite="stage-b-cpu", or move it to tests/fast',
    ),
    "fast-gpu on CPUs": (
        GPU,
        'register_cpu_ci(est_time=60, suite="stage-b-cpu")',
        "a module of tests/fast-gpu in a suite of CPUs. Fix: write register_cuda_ci, or move it to tests/fast",
    ),
    "fast on GPUs": (
        FAST,
        'register_cuda_ci(est_time=60, suite="stage-b-1-gpu-h200")',
        "tests/fast runs on CPUs alone. Fix: move the test to tests/fast-gpu, or remove register_cuda_ci",
    ),
    "fast twice": (
        FAST,
        'register_cpu_ci(est_time=60, suite="stage-a-cpu"); register_cpu_ci(est_time=9, suite="stage-a-cpu")',
        "a second register_cpu_ci for stage-a-cpu, after that of line 2. Fix: keep one",
    ),
    "fast without slow tests": (
        FAST,
        'register_cpu_ci(est_time=60, suite="stage-b-cpu")',
        "stage-b-cpu is named, but no test here is marked slow. Fix: remove the call",
    ),
    "fast without quick tests": (
        FAST,
        f'register_cpu_ci(est_time=60, suite="stage-a-cpu")\nimport pytest\n{SLOW_TEST}',
        "stage-a-cpu is named, but every test here is marked slow. Fix: remove the call",
    ),
    "a helper": (
        "tests/e2e/helper.py",
        'register_cpu_ci(est_time=60, suite="stage-b-cpu")',
        "register_cpu_ci in a module that holds no tests. Fix: move the call to the test_*.py it is about",
    ),
    "a folder of its own": (
        "tests/odd/test_x.py",
        "x = 1",
        "no suite runs tests/odd. Fix: move it to one of tests/e2e, tests/fast, tests/fast-gpu",
    ),
}
WHOLE_MODULE = ("no suite runs",)


@pytest.mark.parametrize(("file", "line", "told"), WRONG.values(), ids=WRONG)
def test_each_mistake_is_told_with_file_line_and_what_to_write(tmp_path, file, line, told):
    number = 1 if told.startswith(WHOLE_MODULE) else 2
    assert issues(tmp_path, {file: f"{IMPORT}{line}\n"}) == [f"{file}:{number}: {told}"]


def test_a_module_that_cannot_be_parsed_is_told_with_its_line(tmp_path):
    (issue,) = issues(tmp_path, {E2E: "x = 1\ndef test_a(:\n"})
    assert issue.startswith(f"{E2E}:2: cannot be read: invalid syntax")
    assert issue.endswith("Fix: correct the module")


def test_all_mistakes_of_all_modules_are_told_at_once(tmp_path):
    found = issues(
        tmp_path,
        {
            E2E: f"{IMPORT}register_cpu_ci(est_time=-1, suite='x', disabled='')\n",
            GPU: "x = 1\n",
        },
    )
    assert [issue.split(": ")[0] for issue in found] == [f"{E2E}:2"] * 3 + [f"{GPU}:1"]


def test_registrations_are_read_without_running_the_module(tmp_path):
    source = (
        'raise SystemExit("was imported")\n'
        'register_cpu_ci(est_time=60, suite="stage-b-cpu", labels=("weights", "moe"), nightly=True)\n'
        'register_cuda_ci(est_time=1.5, suite="stage-c-2-gpu-h200", disabled="no such machine today")\n'
    )
    assert collect(tree(tmp_path, {E2E: source, "tests/e2e/helper.py": "x = 1\n", "tests/ci/test_no.py": ""})) == [
        Registration(E2E, "stage-b-cpu", 60.0, ("weights", "moe"), True, None, 2),
        Registration(E2E, "stage-c-2-gpu-h200", 1.5, (), False, "no such machine today", 3),
    ]


SPLITS = {
    "quick": (QUICK_TEST, ["not slow"]),
    "slow": (SLOW_TEST, ["slow"]),
    "both": (QUICK_TEST + SLOW_TEST, ["not slow", "slow"]),
    "whole module slow": ("pytestmark = [pytest.mark.slow]\n" + QUICK_TEST, ["slow"]),
    "one parameter slow": (
        "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.slow)])\ndef test_a(x): pass\n",
        ["not slow", "slow"],
    ),
    "class slow": ("@pytest.mark.slow\nclass TestA:\n    def test_a(self): pass\n", ["slow"]),
    "method slow": ("class TestA:\n    @pytest.mark.slow\n    def test_a(self): pass\n", ["slow"]),
    "made by a call": ("TestMachine = Machine.TestCase\n", ["not slow"]),
}


@pytest.mark.parametrize(("source", "markers"), SPLITS.values(), ids=SPLITS)
def test_a_module_of_fast_needs_no_call_and_its_slow_tests_are_a_part_of_their_own(tmp_path, source, markers):
    suites = {"not slow": ("stage-a-cpu", 20), "slow": ("stage-b-cpu", 90)}
    assert collect(tree(tmp_path, {FAST: "import pytest\n" + source})) == [
        Registration(FAST, *suites[part], markers=part) for part in markers
    ]


def test_a_module_of_fast_may_say_how_long_each_of_its_parts_takes(tmp_path):
    source = (
        'register_cpu_ci(est_time=200, suite="stage-a-cpu")\n'
        'register_cpu_ci(est_time=400, suite="stage-b-cpu", labels=["faults"])\n' + QUICK_TEST + SLOW_TEST
    )
    assert collect(tree(tmp_path, {FAST: source})) == [
        Registration(FAST, "stage-a-cpu", 200, line=1, markers="not slow"),
        Registration(FAST, "stage-b-cpu", 400, ("faults",), line=2, markers="slow"),
    ]


def test_each_test_module_of_this_repository_is_in_a_suite_and_no_part_is_in_two():
    entries = collect(ROOT)
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert {entry.file for entry in entries} == modules
    parts = [(entry.file, entry.markers, SUITES[entry.suite].gpus) for entry in entries]
    assert len(parts) == len(set(parts))
    assert all(entry.markers or not entry.file.startswith("tests/fast/") for entry in entries)
