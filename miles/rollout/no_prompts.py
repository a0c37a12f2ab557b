"""The data source of a run without steps."""

from __future__ import annotations

from typing import Any

from miles.core.samples import Group
from miles.errors import DataError


class NoPrompts:
    """Has no prompts and holds none: a run of `--num-rollout 0` only evaluates, on data of its own."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def get_samples(self, num_samples: int) -> list[Group]:
        """Raises DataError: there is no step that could ask."""
        raise DataError(
            "--num-rollout 0", f"{num_samples} prompts were asked for in a run without steps", "--num-rollout STEPS"
        )

    def add_samples(self, samples: list[Group]) -> None:
        """Raises DataError: nothing was given out that could come back."""
        raise DataError("--num-rollout 0", f"{len(samples)} groups came back in a run without steps")

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""
