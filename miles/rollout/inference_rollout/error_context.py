"""Saying where an error happened without losing its kind."""

from __future__ import annotations

from miles.errors import EngineError, HookError, MilesError


def with_context(error: Exception, context: str) -> MilesError:
    """An error of the same kind whose message also says `context`; an error that is not Miles' becomes a MilesError."""
    if isinstance(error, HookError):
        return HookError(error.hook, f"{error.problem}\n    {context}", error.fix)
    if isinstance(error, EngineError):
        text = f"{error.message}\n    {context}"
        return EngineError(text, engine=error.engine, log_path=error.log_path, last_lines=error.last_lines)
    if isinstance(error, MilesError):
        kind = type(error) if type(error).__init__ is MilesError.__init__ else MilesError
        return kind(f"{error}\n    {context}")
    return MilesError(f"{type(error).__name__}: {error}\n    {context}")
