"""File names with a place for the step's number."""

from __future__ import annotations

STEP = "{rollout_id}"
"""What the number of a rollout step takes the place of."""


def step_path(pattern: str, step: int) -> str:
    """`data/3.jsonl` for `data/{rollout_id}.jsonl` and step 3; other braces stay as they are."""
    return pattern.replace(STEP, str(step))
