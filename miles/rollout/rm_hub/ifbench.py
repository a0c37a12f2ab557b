"""The `ifbench` reward: whether a response follows the instructions that its row names, by an installed package."""

from __future__ import annotations

import functools
from typing import Any

from miles.core.samples import Sample
from miles.errors import ConfigError, Issue
from miles.rollout.rm_hub.graders import LabelError
from miles.rollout.rm_hub.worker_pool import WorkerPool

INSTALL = (
    "pip install 'miles[ifbench]', or the package if-verifiable itself, and once: python -m nltk.downloader punkt_tab "
    "stopwords averaged_perceptron_tagger_eng"
)
_REGISTRIES = ("if_verifiable.ifbench.instructions_registry", "if_verifiable.ifeval.instructions_registry")


class InstructionGrader:
    """1.0 when every instruction of a row is followed in the strict reading, else 0.0.

    The metadata of a row has `instruction_id_list` (`["count:word_count_range"]`), `kwargs` (an object for each, whose
    nulls do not count) and, for instructions that need it, `prompt_text`. Instructions of IFBench and of IFEval are
    known. An empty response follows none.
    """

    def __init__(self, timeout_s: float, num_workers: int) -> None:
        """Raises ConfigError when the package is not installed."""
        import importlib.util

        if importlib.util.find_spec("if_verifiable") is None:
            raise ConfigError(
                [Issue("reward.rm_type", "ifbench judges with the package if-verifiable, which is not here", INSTALL)]
            )
        self._pool = WorkerPool("miles.rollout.rm_hub.ifbench.follows", size=num_workers, timeout_s=timeout_s)

    async def grade_sample(self, response: str, sample: Sample) -> float:
        """1.0 or 0.0. Raises LabelError for instructions that are missing or not known."""
        metadata = sample.metadata
        names, kwargs = metadata.get("instruction_id_list"), metadata.get("kwargs")
        if not isinstance(names, list) or not names:
            raise LabelError("the metadata has no instruction_id_list")
        if kwargs is None:
            kwargs = [{} for _ in names]
        if not isinstance(kwargs, list) or len(kwargs) != len(names):
            raise LabelError(f"kwargs of the metadata is no list of {len(names)} objects, one per instruction")
        prompt = metadata.get("prompt_text") or sample.prompt_text
        outcome = await self._pool.run(response, names, [options or {} for options in kwargs], prompt)
        if outcome.value is None:
            return 0.0
        if outcome.value["problem"] is not None:
            raise LabelError(outcome.value["problem"])
        return float(outcome.value["follows"])

    def metrics(self) -> dict[str, float]:
        """Responses that took too long, and those that ended a worker."""
        return {
            "rollout/reward_timeouts": float(self._pool.num_timeouts),
            "rollout/reward_crashes": float(self._pool.num_crashes),
        }

    def close(self) -> None:
        """End every process."""
        self._pool.close()


@functools.cache
def _instructions() -> dict[str, Any]:
    """Name -> class of all instructions. Runs in a worker only."""
    import importlib

    found: dict[str, Any] = {}
    for name in reversed(_REGISTRIES):  # where both know a name, IFBench's own counts
        found |= importlib.import_module(name).INSTRUCTION_DICT
    return found


def follows(response: str, names: list[str], kwargs: list[dict[str, Any]], prompt: str) -> dict[str, Any]:
    """`{"follows": bool, "problem": str | None}`. Runs in a worker only."""
    known = _instructions()
    if unknown := [name for name in names if name not in known]:
        return {"follows": False, "problem": f"no instruction is called {', '.join(unknown)}"}
    answer = bool(response.strip())
    for name, options in zip(names, kwargs, strict=True):
        instruction = known[name](name)
        try:
            instruction.build_description(**{key: value for key, value in options.items() if value is not None})
            if "prompt" in (instruction.get_instruction_args() or {}):
                instruction.build_description(prompt=prompt)
        except (TypeError, ValueError, KeyError) as error:
            return {"follows": False, "problem": f"kwargs of {name} do not fit: {error}"}
        answer = answer and bool(instruction.check_following(response))
    return {"follows": answer, "problem": None}


def warm_up() -> None:
    """Load the package once for all workers."""
    _instructions()
