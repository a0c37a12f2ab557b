"""What a person sees while a run goes on: one line a step, evaluations, long waits."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Mapping

from rich.console import Console as RichConsole

from miles.utils.tracking_utils.eval_table import eval_table


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, s = divmod(round(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


class _Stream(RichConsole):
    def on_broken_pipe(self) -> None:
        """Rich would end the process; a run outlives the reader of its output."""
        raise


class Console:
    """Prints to standard output; colours only on a terminal.

    A run does not depend on who reads it: when a stream cannot be written (its reader left, its disk is full), this is
    told on the other one, and nothing more is written to it.
    """

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 ends no run
        self._rich = _Stream(highlight=False, soft_wrap=True)
        self._errors = _Stream(highlight=False, soft_wrap=True, stderr=True)
        self._steps = range(0)
        self._started_at = time.monotonic()

    def say(self, text: str, style: str | None = None) -> None:
        """One line of plain text."""
        self._print(self._rich, text, style)

    def error(self, text: str) -> None:
        """An error, on standard error."""
        self._print(self._errors, f"error: {text}", "red")

    def _print(self, stream: _Stream, text: str, style: str | None) -> None:
        try:
            stream.print(text, style=style, markup=False)
        except OSError as e:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.file.fileno())  # what is still buffered would fail again at exit
            os.close(nowhere)
            stream.quiet = True
            name, other = ("output", self._errors) if stream is self._rich else ("error", self._rich)
            reason = f"standard {name} cannot be written ({e.strerror or e}), so no more is written there"
            self._print(other, f"{reason}; the run goes on", "yellow")

    def start(self, steps: range) -> None:
        """The loop begins now and goes over `steps`."""
        self._steps = steps
        self._started_at = time.monotonic()

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a step, or of an evaluation."""
        if "perf/train_time" in metrics:
            self.say(self._step_line(step, metrics))
        if not self._steps and any(k.startswith("eval/") for k in metrics):
            for line in eval_table(metrics):
                self.say(line)
            return
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
        if too_long := metrics.get("rollout/dropped_prompts"):
            parts.append(f"prompts dropped {too_long:.0f}")
        done = step - self._steps.start + 1
        per_step = (time.monotonic() - self._started_at) / max(done, 1)
        parts.append(f"left {duration(per_step * (len(self._steps) - done))}")
        return "  ".join(parts)
