"""Noticing that the dynamic filters keep nothing any more, and saying why."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from miles.core.samples import Sample
from miles.errors import TrainingError
from miles.rollout.base_types import RolloutGroup
from miles.rollout.groups import flatten

SHOWN_GROUPS = 3
"""Samples that the error shows, each of another of the groups dropped last."""
SHOWN_CHARS = 200


class Starvation:
    """Counts the groups dropped in a row, without one that was kept."""

    def __init__(self, filters: Sequence[str], limit: int) -> None:
        self._filters, self._limit = filters, limit
        self._reasons: Counter[str] = Counter()
        self._kept = 0
        self._latest: deque[tuple[RolloutGroup, str]] = deque(maxlen=SHOWN_GROUPS)

    def note_kept(self) -> None:
        """A group was kept, so the filters do not starve the run."""
        self._kept += 1
        self._reasons.clear()
        self._latest.clear()

    def note_dropped(self, group: RolloutGroup, reason: str) -> None:
        """A group was dropped. Raises TrainingError, with reasons and samples, when it is the last of too many."""
        self._reasons[reason] += 1
        self._latest.append((group, reason))
        dropped = self._reasons.total()
        if dropped < self._limit:
            return
        reasons = ", ".join(f"{reason} ({n})" for reason, n in self._reasons.most_common())
        shown = "".join(f"\n    dropped as {reason}: {_shown(group)}" for group, reason in self._latest)
        raise TrainingError(
            f"the dynamic filters {', '.join(self._filters)} dropped {dropped} prompt groups in a row "
            f"(--max-filtered-batches): {reasons}; {self._kept} were kept before{shown}\n"
            "    fix: choose prompts that the model solves sometimes but not always, check the reward, or leave out the "
            "filter of --dynamic-sampling-filter-path that drops most"
        )


def _shown(group: RolloutGroup) -> str:
    samples = list(flatten(group))
    if not samples:
        return "a group without samples"
    first: Sample = samples[0]
    rewards = ", ".join(str(sample.reward) for sample in samples[:8]) + (", ..." if len(samples) > 8 else "")
    return (
        f"sample {first.index} (group {first.group_index}), rewards of the group {rewards}\n"
        f"        prompt: {_short(first.prompt_text)}\n"
        f"        response ({first.status.value}, {first.response_length} tokens): {_short(first.response)}"
    )


def _short(text: str) -> str:
    """The text on one line; of a long one both ends, since answers stand at the end."""
    line = " ".join(text.split())
    if len(line) <= SHOWN_CHARS:
        return line or "(empty)"
    return f"{line[: SHOWN_CHARS // 2]} [...] {line[-SHOWN_CHARS // 2 :]}"
