"""`InferenceRolloutFn`: the default of `--rollout-function-path`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.core.plugins import describe_error, load_function, maybe_await
from miles.errors import HookError
from miles.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.filter_hub.base_types import DynamicFilters
from miles.rollout.generate_hub.prefill_logprobs import recompute_log_probs
from miles.rollout.inference_rollout.collect import Collector, by_index
from miles.rollout.inference_rollout.evaluate import Evaluator
from miles.rollout.inference_rollout.state import GenerateState
from miles.rollout.metrics import finite_only
from miles.rollout.rm_hub.alarms import ConstantRewardAlarm


class InferenceRolloutFn:
    """Collects batches from a data source with the run's engines, and evaluates on them."""

    def __init__(self, input: RolloutFnConstructorInput, *, state: GenerateState | None = None) -> None:
        args = input.args
        self.args, self.data_source = args, input.data_source
        self.state = state or GenerateState(args)
        self._sample_filter = _load(args.rollout_sample_filter_path)
        self._all_samples_process = _load(args.rollout_all_samples_process_path)
        self._collector = Collector(
            self.state,
            input.data_source,
            batch_size=args.rollout_batch_size,
            wave_size=args.over_sampling_batch_size or args.rollout_batch_size,
            max_retries=args.rollout_max_group_retries,
            group_timeout_s=args.rollout_group_timeout,
            filters=DynamicFilters(args.dynamic_sampling_filter_path),
            max_filtered_batches=args.max_filtered_batches,
            ledger=input.ledger,
            in_order=args.deterministic_mode,
        )
        self._constant_alarm = ConstantRewardAlarm(args.reward_key)
        self._evaluator = Evaluator(args, self.state.tokenizer)

    async def __call__(
        self, input: RolloutFnTrainInput | RolloutFnEvalInput
    ) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
        """A batch of `--rollout-batch-size` groups, or the results of every evaluation dataset."""
        self.state.rollout_id = input.rollout_id
        if isinstance(input, RolloutFnEvalInput):
            return await self._evaluator.evaluate(input.generate_state or self.state)
        return await self._train(input)

    def note_weight_version(self, version: int) -> None:
        """The engines hold `version` now: requests name it from here on."""
        self.state.weight_version = str(version)

    async def close(self) -> None:
        """End the reward workers."""
        await self._evaluator.close()
        await self.state.close()

    async def _train(self, input: RolloutFnTrainInput) -> RolloutFnTrainOutput:
        args = self.args
        with self.state.reward_hub.step(args.rollout_batch_size * args.n_samples_per_prompt):
            collected = await self._collector.collect()
        await _run_hook(self._sample_filter, self.args.rollout_sample_filter_path, self.args, collected.kept)
        finished = sorted(collected.finished, key=by_index)
        await _run_hook(
            self._all_samples_process,
            self.args.rollout_all_samples_process_path,
            self.args,
            finished,
            self.data_source,
        )
        rescored = await recompute_log_probs(self.state, collected.kept) if args.recompute_logprobs_via_prefill else {}
        rewards, _ = finite_only(self.state.reward_hub.metrics() | self._constant_alarm.look(finished))
        return RolloutFnTrainOutput(samples=collected.kept, metrics={**collected.metrics(), **rescored, **rewards})


def _load(path: str | None) -> Callable[..., Any] | None:
    return None if path is None else load_function(path)


async def _run_hook(fn: Callable[..., Any] | None, path: str, *args: Any) -> None:
    """Call a hook that changes samples in place; what it raises comes out as HookError."""
    if fn is None:
        return
    try:
        await maybe_await(fn(*args))
    except Exception as error:
        raise HookError(path, describe_error(error), "mend this function") from error
