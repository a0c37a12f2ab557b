"""One prompt group: generate for each sample, then rewards."""

from __future__ import annotations

from typing import Any

from miles.core.samples import Group, Sample
from miles.errors import HookError, MilesError
from miles.rollout.base_types import GenerateFnInput, RolloutGroup
from miles.rollout.groups import flatten
from miles.rollout.inference_rollout.state import DEFAULT_GENERATE_FN, GenerateState, current_state
from miles.utils.async_utils import gather_or_cancel
from miles.utils.waits import OPEN

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


class UnfinishedGroupError(MilesError):
    """A generate function returned samples that are aborted or failed: the group is no training data."""


async def generate_group(state: GenerateState, group: Group) -> RolloutGroup:
    """Generate and reward all samples of a group at the same time.

    When one fails, the others are cancelled and awaited, and its error is raised. Raises UnfinishedGroupError when
    all returned but some sample is aborted or failed.
    """
    results = await gather_or_cancel([_generate_one(state, sample) for sample in group])
    unfinished = [s for s in flatten(results) if s.status not in FINISHED]
    if unfinished:
        names = ", ".join(f"{s.index} ({s.status.value})" for s in unfinished)
        raise UnfinishedGroupError(f"generation ended without a result for the samples {names}")
    if state.args.group_rm:
        await state.reward_hub.grade_group(list(flatten(results)))
    return results


async def _generate_one(state: GenerateState, sample: Sample) -> Sample | list[Sample]:
    if state.args.group_rm:
        return await generate_sample(state, sample, state.params_for(sample))
    return await generate_and_reward(state, sample, state.params_for(sample))


async def generate_and_reward(
    state: GenerateState, sample: Sample, sampling_params: dict[str, Any], *, evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate for one sample and reward what came out, unless it is unfinished or has its reward already."""
    result = await generate_sample(state, sample, sampling_params, evaluation=evaluation)
    due = [s for s in flatten(result) if s.reward is None and s.status in FINISHED]
    await gather_or_cancel([state.reward_hub.grade(s) for s in due])
    return result


async def generate_sample(
    state: GenerateState, sample: Sample, sampling_params: dict[str, Any], *, evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate for one sample, without reward; one that is finished already is left as it is."""
    if sample.status in FINISHED:
        return sample
    with OPEN.on("samples in flight", "a free place to generate", group=sample.group_index, sample=sample.index):
        await state.semaphore.acquire()
    try:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        path, generate = state.generate_fn(sample)
        current_state.set(state)
        input = GenerateFnInput(state=state, sample=sample, sampling_params=sampling_params, evaluation=evaluation)
        if path == DEFAULT_GENERATE_FN:  # names its requests itself
            output = await generate(input)
        else:
            with OPEN.on(path, "generate", group=sample.group_index, sample=sample.index):
                output = await generate(input)
        state.note_generation_end()
    finally:
        state.semaphore.release()
    _mark_siblings(path, sample, output.samples)
    await state.sample_hooks(state.args, flatten(output.samples), rollout_id=state.rollout_id, evaluation=evaluation)
    return output.samples


def _mark_siblings(path: str, sample: Sample, result: Sample | list[Sample]) -> None:
    """Number the samples that came out like the one that went in, and make several of them one trajectory."""
    outputs = list(flatten(result))
    for output in outputs:
        output.group_index = sample.group_index if output.group_index is None else output.group_index
        output.index = sample.index if output.index is None else output.index
        if output.group_index != sample.group_index:
            raise HookError(
                path,
                f"returned a sample of group {output.group_index} for a prompt of group {sample.group_index}",
                "keep sample.group_index, or leave it None",
            )
        if output.status is Sample.Status.PENDING:
            raise HookError(
                path, f"returned sample {output.index} with the status pending", "set sample.status before returning"
            )
    if len(outputs) == 1:
        return
    names = {s.rollout_id for s in outputs}
    if names == {None}:
        for output in outputs:
            output.rollout_id = sample.index
    elif len(names) > 1:
        raise HookError(
            path,
            f"returned {len(outputs)} samples of one prompt with the rollout ids {sorted(map(str, names))}",
            "give samples of one trajectory the same rollout_id, or leave it None in all",
        )
