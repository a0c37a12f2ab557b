"""Where an author's function stands."""

from __future__ import annotations

import inspect
from typing import Any


def place_of(fn: Any) -> str:
    """File and line of a function, a class, or the class of a callable object."""
    target = inspect.unwrap(fn) if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn)
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', '?')}"
