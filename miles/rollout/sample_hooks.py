"""`--rollout-sample-hook-path`: users' functions that see each finished sample before its reward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from miles.core.plugins import describe_error, load_function, maybe_await
from miles.core.samples import Sample
from miles.errors import HookError, MilesError
from miles.utils.waits import OPEN


class SampleHooks:
    """The functions at `paths`, called in their order. Raises HookError when one does not load."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._functions = [(path, load_function(path)) for path in paths]

    async def __call__(self, args: Any, samples: Iterable[Sample], *, rollout_id: int, evaluation: bool) -> None:
        """Call every function with every finished one of `samples`.

        Raises HookError when one fails, or leaves a sample whose lengths disagree.
        """
        finished = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        for sample in samples if self._functions else ():
            for path, function in self._functions:
                if sample.status in finished:
                    await _call(path, function, args, sample, rollout_id, evaluation)


async def _call(path: str, function: Any, args: Any, sample: Sample, rollout_id: int, evaluation: bool) -> None:
    try:
        with OPEN.on(path, "sample hook", group=sample.group_index, sample=sample.index):
            await maybe_await(function(args, sample, rollout_id=rollout_id, evaluation=evaluation))
        sample.validate()
    except MilesError:
        raise
    except Exception as error:
        raise HookError(path, describe_error(error), "mend this function") from error
