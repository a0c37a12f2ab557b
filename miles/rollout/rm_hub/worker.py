"""A worker process: applies one function to one job after another, as lines of JSON on its standard streams.

It is run as a file, so it may import nothing but the standard library until the owner has said what is where. It ends
when its standard input closes or, where the kernel can do that, with the thread of the pool that started it; and a
timer ends it when a job runs past its limit while nobody kills it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

GRACE_S = 5.0
"""Seconds past a job's limit after which the kernel ends an orphan; the owner kills at the limit."""


def main() -> None:
    """Read a greeting (`sys_path`, `function`, `memory_bytes`), answer `{"ready": true}`, then serve jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the function prints goes to standard error
    greeting = json.loads(sys.stdin.readline())
    sys.path[:] = greeting["sys_path"]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (greeting["memory_bytes"],) * 2)
    try:
        _load("miles.utils.process.die_with_parent")()
        function = _load(greeting["function"])
    except Exception as error:  # noqa: BLE001 - told to the owner, who raises it
        _send(replies, {"failed": f"{type(error).__name__}: {error}"})
        return
    _send(replies, {"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, job["limit_s"] + GRACE_S)
        try:
            reply = {"value": function(*job["args"])}
        except Exception as error:  # noqa: BLE001 - told to the owner, who raises it
            reply = {"raised": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply)


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _send(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
