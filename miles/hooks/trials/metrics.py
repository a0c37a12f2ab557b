"""Contract tests of log functions."""

from __future__ import annotations

from typing import Any

from miles.hooks.trial import CONTENT, IDENTITY, TRAINED, Snapshot, Trial
from miles.rollout.groups import flatten
from miles.rollout.log_functions import LogFunction

WANTED = "return True to leave the usual metrics out, else False; add numbers to extra_metrics"


async def rollout_log(trial: Trial) -> None:
    """`fn(rollout_id, args, samples, extra_metrics, rollout_time)`: a bool, and numbers in `extra_metrics`."""
    samples = list(flatten(trial.groups()))
    await _log(trial, samples, (0, trial.args, samples), (1.5,))


async def eval_log(trial: Trial) -> None:
    """`fn(rollout_id, args, data, extra_metrics)`: a bool, and numbers in `extra_metrics`."""
    samples = list(flatten(trial.groups()))
    result = {"rewards": [s.reward for s in samples], "truncated": [False] * len(samples), "samples": samples}
    await _log(trial, samples, (0, trial.args, {"heldout": result}), ())


async def _log(trial: Trial, samples: list[Any], before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    snapshot = Snapshot(samples, (*IDENTITY, *CONTENT, *TRAINED, "reward"))
    function = LogFunction(trial.path)
    trial.report.begin(f"{len(samples)} samples")
    try:
        metrics = await trial.call(*before, fn=_bound(function, after))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        trial.raised(error, wanted=WANTED)
        return
    added = sorted(set(metrics) - {"usual", "extra"})
    parts = ["" if "usual" in metrics else "leaves the usual metrics out", f"logs {', '.join(added)}" if added else ""]
    trial.report.ok("; ".join(filter(None, parts)))
    trial.unchanged(snapshot, samples, mend="only read the samples: they are about to be trained on")


def _bound(function: LogFunction, after: tuple[Any, ...]) -> Any:
    async def call(*before: Any) -> Any:
        return await function(*before, defaults={"usual": 1.0}, extra={"extra": 1.0}, after=after)

    return call
