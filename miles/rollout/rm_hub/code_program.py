"""Inside the process of a program that a model wrote: run it like `python FILE`, or evaluate what a test asks for.

Standard library only. What a test asks for goes out as plain data; whether it is right is decided elsewhere, by
somebody who knows what is expected, which this process never does.
"""

from __future__ import annotations

import atexit
import builtins
import decimal
import fractions
import io
import json
import os
import random
import sys
import threading
import traceback
import types
from typing import Any

_BUILTINS = dict(vars(builtins))
_MOST_JSON = 1 << 63
_COMPARISONS = {"==", "!=", "<", "<=", ">", ">=", "is", "is not", "in", "not in"}


def run(source: str, ask: dict[str, Any] | None, report: int | None, folder: str) -> None:
    """Run `source`, then answer `ask` into the descriptor `report`; ends the process.

    With no `ask`, it runs as `__main__`. The exit status is Python's: 0, 1 after an exception with its traceback on
    standard error, or what `sys.exit` was given.
    """
    leave = os._exit
    code = 1
    try:
        _prepare(folder)
        name = "__main__" if ask is None else "solution"
        module = types.ModuleType(name)
        sys.modules["__main__"] = sys.modules[name] = module
        code = _status(lambda: exec(compile(source, "solution.py", "exec", dont_inherit=True), vars(module)))
        if code == 0 and ask is not None and report is not None:
            code = _status(lambda: _write(report, _answer(vars(module), ask)))
        code = _finish() or code
    finally:
        leave(code & 0xFF)


def _prepare(folder: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({"HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8"})
    given = open(0, "rb", closefd=False)  # noqa: SIM115 - the program's own streams stay open
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(given, encoding="utf-8", errors="replace")
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["solution.py"]
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)  # the site module, which is not loaded, has them
    random.seed(0)


def _status(function: Any) -> int:
    try:
        function()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0)
        print(error.code, file=sys.stderr)  # noqa: T201 - as Python itself does
        return 1
    except BaseException:  # noqa: BLE001 - as at the end of any program
        traceback.print_exc()
        return 1
    return 0


def _finish() -> int:
    """Wait for threads and flush, as at the end of any program."""
    code = _status(threading._shutdown)  # pyright: ignore[reportAttributeAccessIssue]
    code = _status(atexit._run_exitfuncs) or code
    return _status(lambda: (sys.stdout.flush(), sys.stderr.flush())) or code


def _answer(names: dict[str, Any], ask: dict[str, Any]) -> dict[str, Any]:
    names = {**names, "__builtins__": _BUILTINS}
    if "function" in ask:
        return {"parts": [plain(_callable(names, ask["function"])(*ask["args"]))]}
    exec(compile(ask["setup"], "setup.py", "exec", dont_inherit=True), names)
    if "statements" in ask:
        exec(compile(ask["statements"], "test.py", "exec", dont_inherit=True), names)
        return {"held": True}
    values = [eval(compile(part, "test.py", "eval", dont_inherit=True), names) for part in ask["parts"]]
    try:
        return {"parts": [plain(value) for value in values]}
    except ValueError:
        if ask["plain_only"]:
            raise
        return {"held": bool(_combine(values, ask["operator"]))}


def _combine(values: list[Any], operator: str) -> Any:
    if len(values) == 1:
        return not values[0] if operator == "not" else values[0]
    assert operator in _COMPARISONS
    return eval(f"a {operator} b", {"a": values[0], "b": values[1]})


def _callable(names: dict[str, Any], name: str) -> Any:
    """The function of that name, or the method of a class `Solution`."""
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)
    if name not in names:
        raise NameError(f"the solution defines no {name}")
    return names[name]


def plain(value: Any) -> Any:
    """Plain data as JSON that keeps Python's types; raises ValueError for anything else.

    Looks at real types and uses their own methods only, so that no class of the solution has a say.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if int in kind.__mro__:
        number = int.__pos__(value)
        return number if abs(number) < _MOST_JSON else {"int": hex(number)}
    if float in kind.__mro__:
        return float.__pos__(value)
    if str in kind.__mro__:
        return str.__str__(value)
    for base, tag in ((complex, "complex"), (bytes, "bytes")):
        if base in kind.__mro__:
            return {tag: base.__repr__(value)}
    for exact, tag in ((decimal.Decimal, "decimal"), (fractions.Fraction, "fraction")):
        if kind is exact:
            return {tag: str(value)}
    for base, tag in ((tuple, "tuple"), (list, ""), (set, "set"), (frozenset, "set")):
        if base in kind.__mro__:
            items = [plain(item) for item in base.__iter__(value)]
            return {tag: items} if tag else items
    if dict in kind.__mro__:
        return {"dict": [[plain(key), plain(item)] for key, item in dict.items(value)]}
    raise ValueError(f"{kind} is no plain data")


def _write(report: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(report, data) :]
