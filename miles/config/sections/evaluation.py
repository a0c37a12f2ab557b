"""Settings of evaluation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from miles.config.base import ConfigModel, Flag


class EvalDataset(ConfigModel):
    """One dataset of evaluation."""

    name: str
    """Name in the metrics: `eval/NAME`."""
    path: str
    """JSONL file of prompts."""
    n_samples_per_eval_prompt: PositiveInt = 1
    """Samples per prompt."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 is greedy; unset takes `eval.temperature`."""
    max_response_len: PositiveInt | None = None
    """Tokens a response may have; unset takes `eval.max_response_len`."""
    max_prompts: PositiveInt | None = None
    """Evaluate only the first so many rows; unset takes all."""


class EvalConfig(ConfigModel):
    """Evaluation on held-out prompts."""

    interval: Annotated[PositiveInt | None, Flag("--eval-interval")] = None
    """Evaluate every so many steps and after the last; unset never evaluates."""
    before_train: Annotated[bool, Flag(inverted=("--skip-eval-before-train",))] = True
    """Evaluate once before the first step of a run that starts from step 0."""
    prompt_data: Annotated[list[str], Flag("--eval-prompt-data")] = []
    """Pairs of name and JSONL file: `--eval-prompt-data gsm test.jsonl aime aime.jsonl`."""
    datasets: list[EvalDataset] = []
    """Datasets with settings of their own; recipes list them."""
    n_samples_per_eval_prompt: Annotated[PositiveInt, Flag("--n-samples-per-eval-prompt")] = 1
    """Samples per prompt of the datasets named by `--eval-prompt-data`."""
    temperature: Annotated[NonNegativeFloat | None, Flag("--eval-temperature")] = None
    """Sampling temperature in evaluation; unset takes `--rollout-temperature`."""
    top_p: Annotated[float | None, Flag("--eval-top-p"), Field(gt=0, le=1)] = None
    """Nucleus sampling in evaluation; unset takes `--rollout-top-p`."""
    top_k: Annotated[int | None, Flag("--eval-top-k"), Field(ge=-1)] = None
    """Top-k sampling in evaluation; unset takes `--rollout-top-k`."""
    max_response_len: Annotated[PositiveInt | None, Flag("--eval-max-response-len")] = None
    """Tokens an evaluation response may have; unset takes `--rollout-max-response-len`."""
