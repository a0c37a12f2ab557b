"""Reads from the source of every test module which suites run it."""

import ast
import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ci.register import FAST, ONE_GPU, SLOW, SUITES

FOLDERS = ("e2e", "fast", "fast-gpu")
"""The folders of tests/ that hold test modules."""
CALLS = {"register_cpu_ci": False, "register_cuda_ci": True}
"""The calls, and whether the suites they name have GPUs."""
FIELDS = ("est_time", "suite", "labels", "nightly", "disabled")
WORDS = (*(name.encode() for name in CALLS), b"slow")
"""A module of tests/fast without any of these says nothing about where it runs."""
AUTO_EST_TIME = {FAST.name: 20.0, SLOW.name: 90.0}
"""Seconds that a module of tests/fast is thought to take where it does not say."""


class RegistrationError(Exception):
    """Every mistake in the registrations of a tree, one a line."""

    def __init__(self, issues: Iterable[str]) -> None:
        self.issues = tuple(issues)
        super().__init__("\n".join(self.issues))


@dataclass(frozen=True)
class Registration:
    """One test module in one suite."""

    file: str
    """Path from the root of the repository, with slashes."""
    suite: str
    est_time: float
    """Seconds."""
    labels: tuple[str, ...] = ()
    nightly: bool = False
    disabled: str | None = None
    line: int | None = None
    """Where the call stands; None where the module is registered by its folder."""
    markers: str = ""
    """pytest's `-m`; the empty string takes every test."""


def collect(root: Path) -> list[Registration]:
    """Every test module under `root`/tests in each suite that runs it, ordered by path.

    Raises:
        RegistrationError: with every mistake found, each with its file, its line and what to write.
    """
    found: list[Registration] = []
    issues: list[str] = []
    for path in sorted((root / "tests").rglob("*.py")):
        inside = path.relative_to(root / "tests")
        if inside.parts[0] == "ci":
            continue
        module = Module(path, path.relative_to(root).as_posix(), inside.parts[0])
        found += module.registrations()
        issues += module.issues
    if issues:
        raise RegistrationError(issues)
    return found


class Module:
    """The registrations of one module, and what is wrong with them."""

    def __init__(self, path: Path, file: str, folder: str) -> None:
        self.file = file
        self.folder = folder
        self.is_test = path.name.startswith("test_") or path.name.endswith("_test.py")
        self.issues: list[str] = []
        self.tree = ast.Module([], [])
        source = path.read_bytes()
        if folder == "fast" and not any(word in source for word in WORDS):
            return  # as most modules are: nothing to read
        try:
            self.tree = ast.parse(source, filename=file)
        except (SyntaxError, ValueError) as error:
            self.is_test = False
            self._issue(getattr(error, "lineno", None) or 1, f"cannot be read: {error}", "correct the module")

    def registrations(self) -> list[Registration]:
        calls = list(self._calls())
        if not self.is_test:
            for line, name, _ in calls:
                self._issue(
                    line, f"{name} in a module that holds no tests", "move the call to the test_*.py it is about"
                )
            return []
        if self.folder not in FOLDERS:
            self._issue(1, f"no suite runs tests/{self.folder}", f"move it to one of {_names('tests/', FOLDERS)}")
            return []
        read = [entry for call in calls if (entry := self._read(*call))]
        self._check_repeats(calls, read)
        return self._of_fast(read) if self.folder == "fast" else self._of_others(calls, read)

    def _issue(self, line: int, found: str, fix: str) -> None:
        self.issues.append(f"{self.file}:{line}: {found}. Fix: {fix}")

    def _calls(self) -> Iterator[tuple[int, str, ast.Call]]:
        """The calls that stand as they must; others become issues."""
        at_module_level = {id(node.value) for node in self.tree.body if isinstance(node, ast.Expr)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name in CALLS and alias.asname:
                        self._issue(
                            node.lineno,
                            f"{alias.name} under the name {alias.asname} cannot be found in the source",
                            f"write from tests.ci.register import {alias.name}",
                        )
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name not in CALLS:
                continue
            if id(node) in at_module_level and isinstance(node.func, ast.Name):
                yield node.lineno, name, node
            else:
                self._issue(
                    node.lineno,
                    f"{name} is called, but not at module level as a line of its own",
                    f"write {name}(...) unindented, outside of functions, classes and conditions",
                )

    def _read(self, line: int, name: str, call: ast.Call) -> Registration | None:
        """The call's values, where all are right."""
        before = len(self.issues)
        values = self._literals(line, name, call)
        if len(self.issues) == before:
            for found, fix in _mistakes(name, values):
                self._issue(line, f"{name}: {found}", fix)
        if len(self.issues) > before:
            return None
        labels = tuple(values.get("labels", ()))
        return Registration(
            self.file,
            values["suite"],
            float(values["est_time"]),
            labels,
            values.get("nightly", False),
            values.get("disabled"),
            line,
        )

    def _literals(self, line: int, name: str, call: ast.Call) -> dict:
        example = f'{name}(est_time=60, suite="{_suites(CALLS[name])[0]}")'
        if call.args:
            self._issue(line, f"{name} has values without a name", f"name each, as in {example}")
        values = {}
        for keyword in call.keywords:
            try:
                if keyword.arg is not None:
                    values[keyword.arg] = ast.literal_eval(keyword.value)
                    continue
            except (ValueError, TypeError):
                pass
            written = ast.unparse(keyword.value)
            what = f"**{written}" if keyword.arg is None else f"{keyword.arg}={written}"
            self._issue(
                line,
                f"{name}: {what} is no literal",
                f"write the value itself, as in {example}: the module is not run",
            )
        return values

    def _check_repeats(self, calls: list[tuple[int, str, ast.Call]], read: list[Registration]) -> None:
        """A module registers once for each kind of machine; in tests/fast, once for each of its two parts."""
        if self.folder == "fast":
            kinds = [
                (entry.line, f"register_cpu_ci for {entry.suite}") for entry in read if not SUITES[entry.suite].gpus
            ]
        else:
            kinds = [(line, name) for line, name, _ in calls]
        seen: dict[str, int | None] = {}
        for line, kind in kinds:
            if kind in seen:
                self._issue(line or 1, f"a second {kind}, after that of line {seen[kind]}", "keep one")
            seen.setdefault(kind, line)

    def _of_others(self, calls: list, read: list[Registration]) -> list[Registration]:
        if not calls and not self.issues:
            if self.folder == "fast-gpu":
                line = f'register_cuda_ci(est_time=60, suite="{ONE_GPU.name}")'
            else:
                line = f'register_cpu_ci(est_time=60, suite="{SLOW.name}")'
            self._issue(1, "no suite runs this module", f"after its imports write {line}, with the seconds it takes")
        for entry in read:
            if self.folder == "fast-gpu" and not SUITES[entry.suite].gpus:
                self._issue(
                    entry.line or 1,
                    "a module of tests/fast-gpu in a suite of CPUs",
                    "write register_cuda_ci, or move it to tests/fast",
                )
            if entry.suite == FAST.name and self.folder == "e2e":
                self._issue(
                    entry.line or 1,
                    f"a module of tests/e2e in {FAST.name}",
                    f'write suite="{SLOW.name}", or move it to tests/fast',
                )
        return read

    def _of_fast(self, read: list[Registration]) -> list[Registration]:
        """Its quick tests in one suite, those marked slow in another; a call only corrects what is assumed."""
        parts = {}
        if _has_quick_tests(self.tree):
            parts[FAST.name] = "not slow"
        if any(_is_slow_mark(node) for node in ast.walk(self.tree)):
            parts[SLOW.name] = "slow"
        said = {}
        for entry in read:
            if SUITES[entry.suite].gpus:
                self._issue(
                    entry.line or 1,
                    "tests/fast runs on CPUs alone",
                    "move the test to tests/fast-gpu, or remove register_cuda_ci",
                )
            elif entry.suite not in parts:
                which = "no test here is" if entry.suite == SLOW.name else "every test here is"
                self._issue(entry.line or 1, f"{entry.suite} is named, but {which} marked slow", "remove the call")
            else:
                said.setdefault(entry.suite, entry)
        assumed = {name: Registration(self.file, name, AUTO_EST_TIME[name]) for name in parts}
        entries = {**assumed, **said}
        return [_with_markers(entries[name], markers) for name, markers in parts.items()]


def _with_markers(entry: Registration, markers: str) -> Registration:
    return Registration(**{**vars(entry), "markers": markers})


def _suites(gpus: bool) -> list[str]:
    return [suite.name for suite in SUITES.values() if bool(suite.gpus) == gpus]


def _names(prefix: str, names: Iterable[str]) -> str:
    return ", ".join(prefix + name for name in names)


def _mistakes(name: str, values: dict) -> Iterator[tuple[str, str]]:
    """What is wrong with the values of a call, and what to write."""
    for key in values:
        if key not in FIELDS:
            near = difflib.get_close_matches(key, FIELDS, 1)
            yield f"there is no {key}", f"write {near[0]}" if near else f"there are {_names('', FIELDS)}"
    est_time, suite = values.get("est_time"), values.get("suite")
    if isinstance(est_time, bool) or not isinstance(est_time, int | float) or not 0 < est_time < math.inf:
        yield f"est_time is {est_time!r}", "write the seconds the module takes, as in est_time=60"
    if not isinstance(suite, str) or suite not in SUITES:
        near = difflib.get_close_matches(str(suite), SUITES, 1)
        yield (
            f"there is no suite {suite!r}",
            f"did you mean {near[0]}? There are {_names('', SUITES)}" if near else f"there are {_names('', SUITES)}",
        )
    elif bool(SUITES[suite].gpus) != CALLS[name]:
        other = next(call for call in CALLS if call != name)
        yield (
            f"{suite} is a suite of {'GPUs' if SUITES[suite].gpus else 'CPUs'}",
            f"write {other}, or one of {_names('', _suites(CALLS[name]))}",
        )
    labels = values.get("labels", ())
    if not isinstance(labels, list | tuple) or not all(isinstance(label, str) and label for label in labels):
        yield f"labels is {labels!r}", 'write words, as in labels=["weights"]'
    if not isinstance(values.get("nightly", False), bool):
        yield f"nightly is {values['nightly']!r}", "write True or False"
    disabled = values.get("disabled")
    if disabled is not None and not (isinstance(disabled, str) and disabled.strip()):
        yield f"disabled is {disabled!r}", 'write the reason, as in disabled="engine 0.6 answers 500, issue 31"'


def _is_slow_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "slow" and getattr(node.value, "attr", "") == "mark"


def _has_quick_tests(tree: ast.Module) -> bool:
    """Whether any test of the module runs where slow ones are left out."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and "pytestmark" in [getattr(target, "id", "") for target in node.targets]:
            whole_module = any(map(_is_slow_mark, ast.walk(node.value)))
            if whole_module:
                return False
    tests = list(_tests(tree.body))
    return not tests or not all(tests)


def _tests(body: list[ast.stmt]) -> Iterator[bool]:
    """For each test, whether it is marked slow."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            whole = any(map(_is_slow_mark, node.decorator_list))
            yield from (whole or slow for slow in _tests(node.body))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield any(map(_is_slow_mark, node.decorator_list))
