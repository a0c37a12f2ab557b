"""What a person sees while a run goes on: one line a step, evaluations, long waits."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console as RichConsole


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, s = divmod(round(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


class Console:
    """Prints to standard output; colours only on a terminal."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._errors = RichConsole(highlight=False, soft_wrap=True, stderr=True)
        self._steps = range(0)
        self._started_at = time.monotonic()

    def say(self, text: str, style: str | None = None) -> None:
        """One line of plain text."""
        self._rich.print(text, style=style, markup=False)

    def error(self, text: str) -> None:
        """An error, on standard error."""
        self._errors.print(f"error: {text}", style="red", markup=False)

    def start(self, steps: range) -> None:
        """The loop begins now and goes over `steps`."""
        self._steps = steps
        self._started_at = time.monotonic()

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a step, or of an evaluation."""
        if "perf/train_time" in metrics:
            self.say(self._step_line(step, metrics))
        evals = {k: v for k, v in metrics.items() if k.startswith("eval/") and k.count("/") == 1}
        if evals:
            shown = "  ".join(f"{k.removeprefix('eval/')} {v:.3f}" for k, v in evals.items())
            when = "before training" if step < self._steps.start else f"after step {step}"
            self.say(f"  eval {when}: {shown}", style="bold")

    def _step_line(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step + 1:>{len(str(self._steps.stop))}}/{self._steps.stop}"]
        for label, name, form in (
            ("reward", "rollout/reward", ".3f"),
            ("len", "rollout/response_len/mean", ".1f"),
            ("loss", "train/loss", ".4f"),
            ("tok/s", "rollout/response_tokens_per_s", ".0f"),
            ("generate", "perf/generate_time", ".2f"),
            ("train", "perf/train_time", ".2f"),
        ):
            if name in metrics:
                unit = " s" if name.endswith("_time") else ""
                parts.append(f"{label} {metrics[name]:{form}}{unit}")
        done = step - self._steps.start + 1
        per_step = (time.monotonic() - self._started_at) / max(done, 1)
        parts.append(f"left {duration(per_step * (len(self._steps) - done))}")
        return "  ".join(parts)
