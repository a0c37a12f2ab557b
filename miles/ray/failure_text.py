"""What a user is told when a run fails."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from miles.errors import MilesError
from miles.utils.disk import write_whole

_DIED = re.compile(r"The actor died.*?class_name: (?P<name>\w+).*?pid: (?P<pid>\d+)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def explain_failure(error: Exception, run_dir: Path) -> str:
    """`message_of`, and where to read more: the traceback is written to `logs/error.txt`."""
    text = message_of(error)
    trace = run_dir / "logs" / "error.txt"
    try:
        write_whole(trace, _COLOUR.sub("", "".join(traceback.format_exception(error))))
    except MilesError as e:
        return f"{text}\n    logs: {trace.parent}; no traceback there: {e.__cause__}"
    return f"{text}\n    traceback: {trace}\n    logs: {trace.parent}"


def message_of(error: Exception) -> str:
    """What a user can act on, out of Ray's wrapping and without a traceback."""
    cause = getattr(error, "cause", None)
    told = cause if isinstance(cause, Exception) else error
    if died := _DIED.search(str(told)) if type(told).__module__ == "ray.exceptions" else None:
        return (
            f"{died['name']} (process {died['pid']}) died in the middle of its work\n"
            "    fix: read the end of its log; when that says nothing, the machine ran out of memory (see dmesg)"
        )
    text = str(told) if isinstance(told, MilesError) else f"{type(told).__name__}: {told}"
    return "\n    ".join([text, *getattr(told, "__notes__", ())])
