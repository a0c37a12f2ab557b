"""Functions and classes of users: loading them by import path, and checking at start-up that they can be called."""

from __future__ import annotations

import argparse
import importlib
import inspect
import linecache
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

from miles.config.nearest import nearest
from miles.config.schema import RunConfig
from miles.core.hook_contracts import GROUP_REWARD, HOOKS, Call, Contract
from miles.errors import ConfigError, HookError, Issue

__all__ = [
    "GROUP_REWARD",
    "HOOKS",
    "Call",
    "Contract",
    "add_arguments_of",
    "check_signature",
    "describe_error",
    "hooks_of",
    "is_async",
    "load_function",
    "load_hooks",
    "maybe_await",
]

_WHERE_MODULES_ARE = "check the spelling, and run from the folder that holds the module or put that on PYTHONPATH"


def load_function(path: str) -> Any:
    """What `path` ("package.module.attribute") names: a function, a class, or any callable object.

    The last dot separates module and attribute; a class inside a class is found too. Modules of the working directory
    are found, wherever the entry point lies. Raises HookError when the module does not import, has no such attribute,
    or the attribute cannot be called.
    """
    _look_in_working_directory()
    module, attributes = _import_longest(path)
    found: Any = module
    for name in attributes:
        if not hasattr(found, name):
            if found is module and len(attributes) > 1:
                raise _no_module(path, module, name)
            owner = getattr(found, "__name__", type(found).__name__)
            raise HookError(path, f"{owner} has no attribute {name!r}", _nearest(name, found))
        found = getattr(found, name)
    if not callable(found):
        raise HookError(
            path, f"is {type(found).__name__} {found!r:.80}, which cannot be called", "name a function or a class"
        )
    return found


def check_signature(hook: Any, contract: Contract, name: str = "") -> str:
    """Check that `hook` can be called as `contract` says; `name` is its import path, for the message.

    Returns the name of the call that fits ("class" for a class), for hooks that may have several shapes. Raises
    HookError that shows what was found and what is wanted.
    """
    name = name or f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
    if inspect.isclass(hook):
        _check_class(cast("type[Any]", hook), contract, name)
        return "class"
    where = f"{contract.path} {name}{_signature_text(hook)}"
    if not contract.calls:
        raise HookError(where, "is a function, and a class is wanted", contract.example)
    fitting = [call for call in contract.calls if _accepts(hook, call)]
    if not fitting:
        forms = " or ".join(map(str, contract.calls))
        raise HookError(where, f"is called as {forms}", contract.example)
    if contract.must_be_async and not is_async(hook):
        raise HookError(
            where, "is a plain function and would stop every other request while it runs", contract.example
        )
    names = list(_signature(hook).parameters)
    return max(fitting, key=lambda call: sum(a == b for a, b in zip(call.positional, names, strict=False))).name


def is_async(hook: Any) -> bool:
    """Whether calling `hook` gives an awaitable, as far as it can be seen from outside."""
    candidates = [hook, inspect.unwrap(hook)]
    if not inspect.isroutine(hook) and not inspect.isclass(hook):
        candidates.append(type(hook).__call__)
    return any(inspect.iscoroutinefunction(candidate) for candidate in candidates)


def hooks_of(config: RunConfig) -> list[tuple[Contract, str]]:
    """Contract and import path of every hook that `config` names."""
    named: list[tuple[Contract, str]] = []
    for flag, contract in HOOKS.items():
        if contract.path == "reward.custom_rm_path" and (flag == GROUP_REWARD) != config.reward.group_rm:
            continue
        section, field = contract.path.split(".")
        found: str | list[str] | None = getattr(getattr(config, section), field)
        named += [(contract, path) for path in (found if isinstance(found, list) else [found]) if path is not None]
    return [*named, *_hooks_of_datasets(config)]


def _hooks_of_datasets(config: RunConfig) -> Iterator[tuple[Contract, str]]:
    """The hooks of evaluation datasets, with the dataset's setting in place of the run's."""
    reward = HOOKS[GROUP_REWARD if config.reward.group_rm else "--custom-rm-path"]
    generate = HOOKS["--custom-generate-function-path"]
    for number, dataset in enumerate(config.eval.datasets):
        where = f"eval.datasets.{number}."
        if dataset.custom_rm_path is not None:
            yield replace(reward, path=f"{where}custom_rm_path"), dataset.custom_rm_path
        if dataset.custom_generate_function_path is not None:
            yield (
                replace(generate, path=f"{where}custom_generate_function_path"),
                dataset.custom_generate_function_path,
            )


def load_hooks(config: RunConfig) -> None:
    """Load and check every hook that `config` names; raises one ConfigError with everything that is wrong."""
    issues: list[Issue] = []
    for contract, path in hooks_of(config):
        try:
            check_signature(load_function(path), contract, path)
        except HookError as error:
            where = error.hook if error.hook.startswith(contract.path) else f"{contract.path} {error.hook}"
            issues.append(Issue(path=where, problem=error.problem, fix=error.fix))
    if issues:
        raise ConfigError(issues)


def add_arguments_of(path: str) -> Callable[[argparse.ArgumentParser], None] | None:
    """The `add_arguments(parser)` that a hook carries to declare flags of its own; None when it has none."""
    found = getattr(load_function(path), "add_arguments", None)
    if found is None:
        return None
    if not callable(found) or not _accepts(found, Call(name="parser", positional=("parser",))):
        raise HookError(
            f"{path}.add_arguments", "is called as add_arguments(parser)", "def add_arguments(parser) -> None"
        )
    return cast("Callable[[argparse.ArgumentParser], None]", found)


async def maybe_await(value: Any) -> Any:
    """`value`, or what awaiting it gives."""
    return await value if inspect.isawaitable(value) else value


def _look_in_working_directory() -> None:
    """Put the working directory first on the path, where Ray puts it in its workers: all processes import the same."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()


def _import_longest(path: str) -> tuple[ModuleType, list[str]]:
    parts = path.split(".")
    file, _, function = path.partition(":")
    if "/" in file or file.endswith(".py"):
        module = file.removeprefix("./").removesuffix(".py").strip("/").replace("/", ".")
        raise HookError(path, "is the name of a file, not an import path", f"write {module}.{function or 'FUNCTION'}")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise HookError(path, "is not an import path", "write package.module.function")
    for split in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:split])
        try:
            return importlib.import_module(name), parts[split:]
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise _import_failed(path, name, error) from error
        except Exception as error:
            raise _import_failed(path, name, error) from error
    raise HookError(path, f"there is no module {'.'.join(parts[:-1])}", _WHERE_MODULES_ARE)


def _no_module(path: str, package: ModuleType, name: str) -> HookError:
    siblings = [
        (m.name, f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(getattr(package, "__path__", []))
    ]
    close = nearest(name, siblings)
    fix = f"did you mean {' or '.join(close)}?" if close else _WHERE_MODULES_ARE
    return HookError(path, f"there is no module {package.__name__}.{name}", fix)


def _import_failed(path: str, module: str, error: Exception) -> HookError:
    """The error of a module's own code, with the line that raised it."""
    if isinstance(error, SyntaxError):
        file, line = error.filename or "?", error.lineno or 0
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        own = [f for f in frames if f.filename != __file__]
        file, line = (own[-1].filename, own[-1].lineno or 0) if own else ("?", 0)
    text = linecache.getline(file, line).strip()
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    problem = f"module {module} does not import: {type(error).__name__}: {message}\n    at {file}:{line}: {text}"
    return HookError(path, problem, "mend that line, or install what it imports")


def describe_error(error: BaseException) -> str:
    """What a user's function raised, and the line that raised it."""
    text = f"raised {type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text}\n    at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else text


def _nearest(name: str, owner: Any) -> str:
    public = [n for n in dir(owner) if not n.startswith("_")]
    if close := nearest(name, [(n, n) for n in public]):
        return f"did you mean {' or '.join(close)}?"
    own = [n for n in public if callable(getattr(owner, n)) and not isinstance(getattr(owner, n), ModuleType)]
    return f"it has {', '.join(own[:10])}" if own else "define it there"


def _check_class(hook: type[Any], contract: Contract, name: str) -> None:
    methods = contract.methods
    where = f"{contract.path} {name}"
    if methods is None:
        raise HookError(where, "is a class, and a function is wanted", contract.example)
    if not _accepts(hook, methods.constructor):
        wanted = ", ".join(methods.constructor.positional)
        raise HookError(where + _signature_text(hook), f"is made as {hook.__name__}({wanted})", contract.example)
    for method, call in methods.required:
        found = getattr(hook, method, None)
        if found is None or (method == "__call__" and "__call__" not in _own_names(hook)):
            raise HookError(where, f"has no method {method}", contract.example)
        bound = Call(name=call.name, positional=("self", *call.positional), keyword=call.keyword)
        is_static = isinstance(inspect.getattr_static(hook, method), staticmethod | classmethod)
        if not _accepts(found, call if is_static else bound):
            raise HookError(
                f"{where}.{method}{_signature_text(found)}",
                f"is called as {method}({', '.join(call.positional)})",
                contract.example,
            )
        if contract.must_be_async and not is_async(found):
            raise HookError(
                f"{where}.{method}",
                "is a plain function and would stop every other request while it runs",
                contract.example,
            )
    if methods.one_of and not any(all(hasattr(hook, m) for m in group) for group in methods.one_of):
        choices = " or ".join(" and ".join(group) for group in methods.one_of)
        raise HookError(where, f"has neither {choices}, so a run could not be resumed", contract.example)


def _own_names(hook: type[Any]) -> set[str]:
    return {name for cls in hook.__mro__ for name in vars(cls)}


def _signature(hook: Any) -> inspect.Signature:
    try:
        return inspect.signature(hook)
    except (ValueError, TypeError):
        anything = [
            inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
        ]
        return inspect.Signature(anything)


def _signature_text(hook: Any) -> str:
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in _signature(hook).parameters.values()]
    return str(inspect.Signature(parameters))


def _accepts(hook: Any, call: Call) -> bool:
    try:
        _signature(hook).bind(*call.positional, **dict.fromkeys(call.keyword))
    except TypeError:
        return False
    return True
