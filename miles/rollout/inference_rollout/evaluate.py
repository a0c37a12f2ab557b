"""Evaluation: every dataset at once, with settings and metrics of its own."""

# P prompts, n samples of a prompt

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import numpy as np

from miles.config.schema import EvalDataset
from miles.core.samples import Sample
from miles.errors import ConfigError, DataError, Issue, MilesError
from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.groups import flatten
from miles.rollout.inference_rollout.error_context import with_context
from miles.rollout.inference_rollout.generate_and_reward import (
    FINISHED,
    generate_and_reward,
    generate_sample,
)
from miles.rollout.inference_rollout.state import GenerateState
from miles.rollout.metrics import defined_reward, pass_at_k
from miles.rollout.prompts import PromptFile, PromptFormat, PromptRow, load_prompts

logger = logging.getLogger(__name__)

Outcome = list[Sample] | Exception
"""The samples of one finished trajectory, or what went wrong."""


class Evaluator:
    """Evaluates the datasets of a run; all are read when it is made, so that bad files show at start."""

    def __init__(self, args: Any, tokenizer: Any, max_context_len: int | None) -> None:
        self._args = args
        self.datasets = eval_datasets(args)
        format = PromptFormat(
            input_key=args.input_key,
            label_key=args.label_key,
            metadata_key=args.metadata_key,
            apply_chat_template=args.apply_chat_template,
            template_kwargs=args.apply_chat_template_kwargs,
            max_prompt_len=args.rollout_max_prompt_len,
            max_context_len=max_context_len,
        )
        self._files = [read_dataset(dataset, format, tokenizer) for dataset in self.datasets]

    async def evaluate(self, state: GenerateState) -> RolloutFnEvalOutput:
        """Evaluate all datasets at the same time, within the concurrency of `state`.

        A sample that fails is counted as an error of its dataset and left out of the other metrics. Raises the first
        error of a dataset in which every sample failed.
        """
        runs = [self._run(state, dataset, file) for dataset, file in zip(self.datasets, self._files, strict=True)]
        metrics: dict[str, float] = {}
        data: dict[str, dict[str, Any]] = {}
        for dataset, file, outcomes_P_n in zip(self.datasets, self._files, await asyncio.gather(*runs), strict=True):
            data[dataset.name], found = summarize(dataset, outcomes_P_n, self._args.eval_reward_key)
            metrics |= found
            if file.num_dropped:
                metrics[f"eval/{dataset.name}/dropped_prompts"] = float(file.num_dropped)
        return RolloutFnEvalOutput(data=data, metrics=metrics)

    async def _run(self, state: GenerateState, dataset: EvalDataset, file: PromptFile) -> list[list[Outcome]]:
        base = {**state.sampling_params, **self._overrides(dataset)}
        rows = file.rows[: dataset.max_prompts]
        jobs = [self._prompt(state, dataset, base, number, row) for number, row in enumerate(rows)]
        return list(await asyncio.gather(*jobs))

    def _overrides(self, dataset: EvalDataset) -> dict[str, Any]:
        """Sampling parameters of a dataset: its own before the evaluation's before the rollout's."""
        args = self._args
        candidates = {
            "temperature": (dataset.temperature, args.eval_temperature),
            "top_p": (args.eval_top_p,),
            "top_k": (args.eval_top_k,),
            "max_new_tokens": (dataset.max_response_len, args.eval_max_response_len),
        }
        found = {name: [v for v in values if v is not None] for name, values in candidates.items()}
        return {name: values[0] for name, values in found.items() if values}

    async def _prompt(
        self, state: GenerateState, dataset: EvalDataset, base: dict[str, Any], number: int, row: PromptRow
    ) -> list[Outcome]:
        """All samples of one prompt; what fails is in the list as its error."""
        n = dataset.n_samples_per_eval_prompt
        samples = [
            Sample(
                group_index=number,
                index=number * n + position,
                prompt=copy.deepcopy(row.prompt),
                tokens=row.tokens.tolist(),
                label=copy.deepcopy(row.label),
                metadata=copy.deepcopy(row.metadata),
            )
            for position in range(n)
        ]
        run = generate_sample if self._args.group_rm else generate_and_reward
        jobs = [
            run(state, s, state.params_for(s, base, stream=f"eval/{dataset.name}"), evaluation=True) for s in samples
        ]
        outcomes = [_outcome(result) for result in await asyncio.gather(*jobs, return_exceptions=True)]
        finished = [sample for outcome in outcomes if isinstance(outcome, list) for sample in outcome]
        if self._args.group_rm and finished:
            (graded,) = await asyncio.gather(state.reward_hub.grade_group(finished), return_exceptions=True)
            if isinstance(graded, BaseException):
                error = _as_exception(graded)
                return [error if isinstance(outcome, list) else outcome for outcome in outcomes]
        return outcomes


def _outcome(result: Any) -> Outcome:
    if isinstance(result, BaseException):
        return _as_exception(result)
    samples = list(flatten(result))
    if all(s.status in FINISHED for s in samples):
        return samples
    return MilesError(f"generation of sample {samples[0].index} ended {samples[0].status.value}")


def _as_exception(error: BaseException) -> Exception:
    if not isinstance(error, Exception):
        raise error
    return error


def summarize(
    dataset: EvalDataset, outcomes_P_n: list[list[Outcome]], reward_key: str | None
) -> tuple[dict[str, Any], dict[str, float]]:
    """Results and metrics of one dataset.

    Results: `rewards` (float or None), `truncated` and `samples`, one entry per finished trajectory in order, and
    `errors`, texts. Metrics under `eval/NAME`: the mean of the defined rewards (left out when there is none),
    `/num_samples` (finished), `/unscored` (finished without a finite reward), `/errors`, `/truncated_ratio`,
    `/response_len`, and `/pass@k` for powers of two up to the dataset's n, over prompts whose samples were all scored.
    A sample is correct when its reward is 1.

    Raises the first error when no sample finished.
    """
    key = f"eval/{dataset.name}"
    flat = [outcome for outcomes in outcomes_P_n for outcome in outcomes]
    finished = [outcome for outcome in flat if isinstance(outcome, list)]
    errors = [outcome for outcome in flat if isinstance(outcome, Exception)]
    if errors and not finished:
        context = f"evaluation of {dataset.name} ({dataset.path}): all {len(errors)} samples failed; this is the first"
        raise with_context(errors[0], context) from errors[0]
    if errors:
        logger.warning("%s: %d of %d samples failed, the first with: %s", key, len(errors), len(flat), errors[0])
    rewards = [_reward(samples, reward_key) for samples in finished]
    scored = [r for r in rewards if r is not None]
    truncated = [any(s.status is Sample.Status.TRUNCATED for s in samples) for samples in finished]
    metrics = {
        f"{key}/num_samples": float(len(finished)),
        f"{key}/unscored": float(len(finished) - len(scored)),
        f"{key}/errors": float(len(errors)),
        f"{key}/truncated_ratio": float(np.mean(truncated)),
        f"{key}/response_len": float(np.mean([sum(s.response_length for s in samples) for samples in finished])),
    }
    if scored:
        metrics[key] = float(np.mean(scored))
    metrics |= {f"{key}/pass@{k}": v for k, v in _pass_at(dataset, outcomes_P_n, reward_key).items()}
    data = {
        "rewards": rewards,
        "truncated": truncated,
        "samples": [samples[0] if len(samples) == 1 else samples for samples in finished],
        "errors": [f"{type(error).__name__}: {error}" for error in errors],
    }
    return data, metrics


def _reward(outcome: Outcome, reward_key: str | None) -> float | None:
    return defined_reward(outcome[0], reward_key) if isinstance(outcome, list) else None


def _pass_at(dataset: EvalDataset, outcomes_P_n: list[list[Outcome]], reward_key: str | None) -> dict[int, float]:
    n = dataset.n_samples_per_eval_prompt
    rewards_P_n = [[_reward(outcome, reward_key) for outcome in outcomes] for outcomes in outcomes_P_n]
    correct_P = [sum(r == 1.0 for r in rewards) for rewards in rewards_P_n if None not in rewards]
    if not correct_P:
        return {}
    ks = [1 << e for e in range(n.bit_length()) if 1 << e <= n]
    return {k: float(np.mean([pass_at_k(n, correct, k) for correct in correct_P])) for k in ks}


def read_dataset(dataset: EvalDataset, format: PromptFormat, tokenizer: Any) -> PromptFile:
    """The prompts of a dataset; raises DataError that names dataset and file."""
    try:
        return load_prompts(dataset.path, format, tokenizer)
    except DataError as error:
        problem = f"{error.problem} (evaluation dataset {dataset.name!r})"
        raise DataError(error.path, problem, error.fix, line=error.line) from None


def eval_datasets(args: Any) -> list[EvalDataset]:
    """The datasets with settings of their own, then the pairs of `--eval-prompt-data`."""
    pairs = args.eval_prompt_data
    if len(pairs) % 2:
        problem = f"{len(pairs)} values are not pairs"
        raise ConfigError([Issue("eval.prompt_data", problem, "give name and file of each dataset")])
    named = [
        EvalDataset(name=name, path=path, n_samples_per_eval_prompt=args.n_samples_per_eval_prompt)
        for name, path in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    datasets = [*args.eval_datasets, *named]
    names = [dataset.name for dataset in datasets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problem = f"{', '.join(twice)} is the name of several datasets"
        raise ConfigError([Issue("eval.datasets", problem, "give each a name of its own; it is the metric's name")])
    return datasets
