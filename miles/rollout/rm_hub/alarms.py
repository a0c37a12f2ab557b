"""An alarm for batches whose rewards are all the same: nothing can be learnt from them, and often the reward is broken."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from miles.core.samples import Sample
from miles.rollout.base_types import RolloutGroup
from miles.rollout.groups import flatten
from miles.rollout.metrics import defined_reward

logger = logging.getLogger(__name__)

_SHOWN = 3
_SHOWN_CHARS = 160


class ConstantRewardAlarm:
    """Looks at every batch; warns at the first of a row of batches with one and the same reward."""

    def __init__(self, reward_key: str | None) -> None:
        self._reward_key = reward_key
        self._streak: float | None = None
        self._num_batches = 0

    def look(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Look at the finished groups of a step, those that filters dropped included; metrics since the start."""
        samples = [sample for group in groups for sample in flatten(group)]
        rewards = {defined_reward(sample, self._reward_key) for sample in samples}
        constant = rewards.pop() if len(rewards) == 1 and len(samples) > 1 else None
        if constant is not None:
            self._num_batches += 1
            if constant != self._streak:
                logger.warning(
                    "all %d rewards of this batch are %g; a model learns nothing from that. Three of the samples:\n%s\n"
                    "    check with `miles reward check` whether the reward reads these answers and labels rightly",
                    len(samples),
                    constant,
                    "\n".join(_shown(sample) for sample in samples[:: max(1, len(samples) // _SHOWN)][:_SHOWN]),
                )
        self._streak = constant
        return {"rollout/reward_constant_batches": float(self._num_batches)}


def _shown(sample: Sample) -> str:
    return (
        f"  - sample {sample.index}: prompt {_short(sample.prompt_text)}\n"
        f"    response {_short(sample.response)}\n    label {_short(str(sample.label))}"
    )


def _short(text: str) -> str:
    """A text on one line: its beginning and, where answers stand, its end."""
    text = " ".join(text[: 8 * _SHOWN_CHARS].split()) if len(text) <= _SHOWN_CHARS else _ends(text)
    return repr(text)


def _ends(text: str) -> str:
    half = _SHOWN_CHARS // 2
    return f"{' '.join(text[:half].split())} ... {' '.join(text[-half:].split())}"
