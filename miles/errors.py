"""The errors a user can meet.

MilesError
|-- ConfigError      settings: every issue found, each with its fix
|-- HookError        a user's function: does not import, has the wrong signature, raised, hung, or returned nonsense
|-- DataError        a row of a data file, with file and line
|-- CheckpointError  a checkpoint or model folder that is missing, incomplete or does not fit
|-- EngineError      an inference engine or the router, with its id and log
|-- ClusterError     a process that the run cannot do without has ended
|-- WeightSyncError  the engine does not hold what the trainer has
|-- ParityError      trainer and engine disagree on log-probabilities
|-- TrainingError    a batch or a step that must not be trained on
|-- LedgerError      a prompt group in a state where it cannot be, or one that is lost: a fault of Miles or of a hook
`-- StalledError     a wait on another process passed its deadline

Every message says what was found, where, and what to do. All of them pickle, since they cross process borders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Issue:
    """One thing wrong with a configuration: where, what, and the change that mends it."""

    path: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}\n    fix: {self.fix}"


class MilesError(Exception):
    """Base of every error that Miles raises on purpose.

    Pickles with its attributes and notes, whatever the arguments of a subclass's `__init__` are.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restored, (type(self), self.args), self.__dict__)


def _restored(kind: type[MilesError], args: tuple[Any, ...]) -> MilesError:
    return kind.__new__(kind, *args)


class ConfigError(MilesError):
    """All issues of one configuration, reported together."""

    def __init__(self, issues: list[Issue]) -> None:
        self.issues = issues
        noun = "problem" if len(issues) == 1 else "problems"
        super().__init__(f"{len(issues)} {noun} in this configuration\n" + "\n".join(f"  - {i}" for i in issues))


class HookError(MilesError):
    """A user's function failed; `hook` is its import path."""

    def __init__(self, hook: str, problem: str, fix: str = "") -> None:
        self.hook, self.problem, self.fix = hook, problem, fix
        super().__init__(f"{hook}: {problem}" + (f"\n    fix: {fix}" if fix else ""))


class DataError(MilesError):
    """A data file or one of its rows is unusable."""

    def __init__(self, path: str, problem: str, fix: str = "", *, line: int | None = None) -> None:
        self.path, self.problem, self.fix, self.line = path, problem, fix, line
        where = path if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {problem}" + (f"\n    fix: {fix}" if fix else ""))


class CheckpointError(MilesError):
    """A checkpoint or model folder is missing, incomplete, or belongs to something else."""


class EngineError(MilesError):
    """An inference engine or the router failed."""

    def __init__(self, message: str, *, engine: str = "", log_path: str = "", last_lines: str = "") -> None:
        self.message, self.engine, self.log_path, self.last_lines = message, engine, log_path, last_lines
        text = f"{engine}: {message}" if engine else message
        if last_lines:
            text += "\n" + "\n".join(f"    | {line}" for line in last_lines.splitlines())
        if log_path:
            text += f"\n    log: {log_path}"
        super().__init__(text)


class ClusterError(MilesError):
    """A process that the run cannot do without has ended: one of Ray's own, the rollout manager, or a trainer rank."""


class WeightSyncError(MilesError):
    """A weight update failed, or its proof did."""


class ParityError(MilesError):
    """Trainer and engine assign different log-probabilities to the same tokens."""


class TrainingError(MilesError):
    """A batch or an optimizer step that must not go on: NaN or inf, too many skipped steps, no trainable token."""


class LedgerError(MilesError):
    """The account of prompt groups does not add up: a group was lost, counted twice, or moved where it cannot go."""


class StalledError(MilesError):
    """A wait on another process passed its deadline."""
