"""Evaluation: every dataset at once, with settings and metrics of its own."""

# P prompts, n samples of a prompt

from __future__ import annotations

import asyncio
import copy
from typing import Any

from miles.core.samples import Sample
from miles.errors import MilesError
from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.groups import flatten
from miles.rollout.inference_rollout.eval_dataset import PreparedDataset, prepare_datasets
from miles.rollout.inference_rollout.eval_summary import Outcome, summarize
from miles.rollout.inference_rollout.generate_and_reward import FINISHED, generate_and_reward, generate_sample
from miles.rollout.inference_rollout.state import GenerateState
from miles.rollout.prompts import PromptRow
from miles.utils.async_utils import gather_or_cancel


class Evaluator:
    """Evaluates the datasets of a run; all are read when it is made, so that bad files show at start."""

    def __init__(self, args: Any, tokenizer: Any) -> None:
        self.datasets = prepare_datasets(args, tokenizer)

    async def evaluate(self, state: GenerateState) -> RolloutFnEvalOutput:
        """Evaluate all datasets at the same time, within the concurrency of `state`.

        A sample that fails is counted in its dataset and left out of the other metrics. Raises the first error of a
        dataset in which every sample failed.
        """
        found = await gather_or_cancel([_run(dataset, dataset.state_from(state)) for dataset in self.datasets])
        metrics: dict[str, float] = {}
        data: dict[str, dict[str, Any]] = {}
        for dataset, outcomes_P_n in zip(self.datasets, found, strict=True):
            name = dataset.settings.name
            data[name], own = summarize(dataset.settings, outcomes_P_n, dataset.file.num_dropped)
            metrics |= own
        return RolloutFnEvalOutput(data=data, metrics=metrics)

    async def close(self) -> None:
        """End the reward workers of datasets with rewards of their own."""
        for hub in {id(d.reward_hub): d.reward_hub for d in self.datasets if d.reward_hub}.values():
            await hub.close()


async def _run(dataset: PreparedDataset, state: GenerateState) -> list[list[Outcome]]:
    rows = dataset.file.rows[: dataset.settings.max_prompts]
    return await gather_or_cancel([_prompt(dataset, state, number, row) for number, row in enumerate(rows)])


async def _prompt(dataset: PreparedDataset, state: GenerateState, number: int, row: PromptRow) -> list[Outcome]:
    """All samples of one prompt; what fails is in the list as its error."""
    n, stream = dataset.settings.n_samples_per_eval_prompt, f"eval/{dataset.settings.name}"
    overrides = dataset.settings.metadata_overrides
    samples = [
        Sample(
            group_index=number,
            index=number * n + position,
            prompt=copy.deepcopy(row.prompt),
            tokens=row.tokens.tolist(),
            label=copy.deepcopy(row.label),
            metadata=copy.deepcopy({**row.metadata, **overrides}),
        )
        for position in range(n)
    ]
    in_groups = state.args.group_rm and state.args.custom_rm_path is not None
    run = generate_sample if in_groups else generate_and_reward
    jobs = [run(state, s, state.params_for(s, stream=stream), evaluation=True) for s in samples]
    outcomes = [_outcome(result) for result in await asyncio.gather(*jobs, return_exceptions=True)]
    finished = [sample for outcome in outcomes if isinstance(outcome, list) for sample in outcome]
    if in_groups and finished:
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
    """What went wrong with one sample; an interrupt is none, and goes on."""
    if isinstance(
        error, asyncio.CancelledError
    ):  # of its own: had somebody cancelled the evaluation, nothing came back
        return MilesError("a generate or reward function ended its own task by raising CancelledError")
    if not isinstance(error, Exception):
        raise error
    return error
