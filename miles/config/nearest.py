"""The names closest to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[tuple[str, str]], limit: int = 2) -> list[str]:
    """Names to suggest in place of `name`, best first.

    `known` pairs each spelling with the name to show for it. Only letters and digits count, so `--rollout-batchsize`
    and `rollout.batch_size` are the same word; a spelling that is the same word is the only suggestion.
    """
    from difflib import SequenceMatcher

    wanted = _squash(name)
    matcher = SequenceMatcher(autojunk=False, b=wanted)
    scores: dict[str, float] = {}
    for spelling, shown in known:
        word = _squash(spelling)
        if word == wanted and wanted:
            return [shown]
        matcher.set_seq1(word)
        if matcher.real_quick_ratio() > 0.6 and matcher.quick_ratio() > 0.6:
            scores[shown] = max(scores.get(shown, 0.0), matcher.ratio())
    ranked = sorted((s for s in scores if scores[s] > 0.6), key=lambda s: -scores[s])
    return [s for s in ranked if scores[s] > scores[ranked[0]] - 0.1][:limit]


def _squash(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
