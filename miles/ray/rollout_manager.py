"""`RolloutManager`: data source, rollout function, rewards, ledger and evaluation; owner of router and engines."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from miles.config.estimators import group_baseline
from miles.config.resources import only_evaluates
from miles.config.schema import RolloutConfig, RunConfig
from miles.core.hook_args import HookArgs
from miles.core.ledger import Ledger, LiveState
from miles.core.plugins import load_function
from miles.core.ports import DataSource, Metrics, RolloutBatch
from miles.core.run_facts import EngineEndpoint, RouterEndpoint, RunFacts
from miles.core.train_batch import TrainBatch
from miles.ray.actor_process import enter
from miles.ray.engine_pool import EnginePool, PoolPlan
from miles.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnTrainInput,
    RolloutGroup,
)
from miles.rollout.buffer_account import settle_buffer
from miles.rollout.custom_conversion import convert_by_hook
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.eval_results import append_results
from miles.rollout.groups import flatten
from miles.rollout.inference_rollout.compatibility import RolloutFnAdapter, load_rollout_fn
from miles.rollout.log_functions import LogFunction
from miles.rollout.metrics import dump_rows, eval_metrics, rollout_metrics
from miles.rollout.overlong_penalty import OverlongPenalty, overlong_metrics
from miles.rollout.saved_samples import SavedSamplesRolloutFn, save_groups
from miles.rollout.train_data_conversion import to_train_batch
from miles.utils import http_utils
from miles.utils.disk import write_whole
from miles.utils.step_path import step_path

ROLE = "rollout-manager"
NO_PROMPTS = "miles.rollout.no_prompts.NoPrompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSpec:
    """What the driver decided for the manager."""

    run_dir: str
    pool: PoolPlan
    start_rollout_id: int
    state: dict[str, Any] | None
    """`state_dict` of the checkpoint that the run resumes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerFacts:
    """What the driver learns once the manager has started."""

    router: RouterEndpoint | None
    engines: tuple[EngineEndpoint, ...]
    num_prompts: int | None
    """Prompts in an epoch; None for a data source without a length."""
    pids: Mapping[str, int]
    """Process ids by name: `rollout-manager`, `router`, `engine-0`, `engine-0-actor`, ..."""


class RolloutManager:
    """One per run. `start` first, `close` last; calls do not overlap, but for those of `pool`."""

    def __init__(self, config: RunConfig, spec: ManagerSpec) -> None:
        enter(ROLE, spec.run_dir)
        self._config, self._spec = config, spec
        self._run_dir = Path(spec.run_dir)
        self._ledger = Ledger()
        self._version: int | None = None
        self._last_step = spec.start_rollout_id - 1
        self._pool = EnginePool(spec.pool)
        self._fn: RolloutFnAdapter | None = None
        self._eval_fn: RolloutFnAdapter | None = None

    async def start(self) -> ManagerFacts:
        """Start router and engines, load the data, build the rollout function."""
        serves = self._spec.pool.num_engines > 0
        engine_starts = asyncio.ensure_future(self._pool.start_engines())
        router = await self._pool.start_router() if serves else None
        facts = self._run_facts(router)
        self._args = HookArgs(self._config, facts)
        source = NO_PROMPTS if only_evaluates(self._config) else self._config.data.source_path
        self._source: DataSource = await asyncio.to_thread(load_function(source), self._args)
        if self._spec.state is not None:
            self._load(self._spec.state)
        self._build_functions()
        engines = await engine_starts
        if serves:
            await self._pool.watch()
        num_prompts = None
        if self._config.rollout.num_rollout is None and hasattr(self._source, "__len__"):
            num_prompts = await asyncio.to_thread(len, self._source)  # it may have to tokenise every row
        pids = {ROLE: os.getpid(), **self._pool.pids()}
        return ManagerFacts(router=router, engines=engines, num_prompts=num_prompts, pids=pids)

    async def pool(self, method: str, *args: Any) -> Any:
        """Call a method of the `EnginePool`."""
        return await getattr(self._pool, method)(*args)

    def _run_facts(self, router: RouterEndpoint | None) -> RunFacts:
        host, port = http_utils.split_host_port(router.url) if router else ("", 0)
        return RunFacts(
            run_dir=self._spec.run_dir,
            start_rollout_id=self._spec.start_rollout_id,
            router_url=router.url if router else "",
            sglang_router_ip=host,
            sglang_router_port=port,
        )

    def _build_functions(self) -> None:
        self._log_rollout = LogFunction(self._config.rollout.custom_log_function_path)
        if self._replays:
            self._fn = RolloutFnAdapter(
                "--load-debug-rollout-data", SavedSamplesRolloutFn(self._config.debug.load_rollout_data or "")
            )
            return
        self._log_evaluation = LogFunction(self._config.eval.custom_log_function_path)
        parts = RolloutFnConstructorInput(self._args, self._source, self._ledger)
        rollout = self._config.rollout
        self._fn = load_rollout_fn(rollout.function_path, parts)
        self._eval_fn = self._fn
        if rollout.eval_function_path:
            self._eval_fn = load_rollout_fn(rollout.eval_function_path, parts, flag="--eval-function-path")

    async def generate(self, step: int) -> RolloutBatch:
        """Collect the batch of `step`, convert it, and put it into the object store; its groups are leased."""
        assert self._fn is not None
        self._last_step = step
        started_at = time.monotonic()
        output = await self._fn(RolloutFnTrainInput(step, self._version))
        seconds = time.monotonic() - started_at
        if (pattern := self._config.debug.save_rollout_data) is not None:
            await asyncio.to_thread(save_groups, step_path(pattern, step), step, output.samples)
        reward = self._config.reward
        data = self._train_batch(output.samples)
        group_indices = () if self._replays else self._lease(output.samples)
        metrics: Metrics = {
            **(self._source.metrics() if isinstance(self._source, RolloutDataSourceWithBuffer) else {}),
            **overlong_metrics(output.samples, self._overlong_penalty()),
            **await self._log_rollout(
                step,
                self._args,
                list(flatten(output.samples)),
                defaults=rollout_metrics(
                    output.samples,
                    reward_key=reward.reward_key,
                    elapsed_s=seconds,
                    passrate=self._config.rollout.log_passrate,
                ),
                extra=output.metrics or {},
                after=(seconds,),
            ),
            **self._ledger.metrics(),
            **(self._pool.metrics() if self._spec.pool.num_engines else {}),
        }
        self._write_rows("rollouts", step, output.samples)
        return RolloutBatch(
            step=step, data=[ray.put(data)], group_indices=group_indices, num_samples=len(data), metrics=metrics
        )

    def _train_batch(self, groups: Sequence[RolloutGroup]) -> TrainBatch:
        """The columns of `groups`, by the user's function where the run names one."""
        algorithm, reward = self._config.algorithm, self._config.reward
        require_rewards = algorithm.loss_type != "sft_loss"
        if (path := reward.custom_convert_samples_path) is not None:
            convert = load_function(path)
            return convert_by_hook(
                lambda samples: convert(self._args, samples), path, groups, require_rewards=require_rewards
            )
        post_process = load_function(reward.custom_post_process_path) if reward.custom_post_process_path else None
        return to_train_batch(
            groups,
            reward_key=reward.reward_key,
            baseline=group_baseline(
                algorithm.advantage_estimator,
                normalize=algorithm.rewards_normalization,
                divide_std=algorithm.grpo_std_normalization,
            ),
            overlong=self._overlong_penalty(),
            require_rewards=require_rewards,
            reward_post_process=(lambda samples: post_process(self._args, samples)) if post_process else None,
            reward_post_process_path=reward.custom_post_process_path or "",
        )

    def _overlong_penalty(self) -> OverlongPenalty | None:
        reward = self._config.reward
        if reward.overlong_buffer_len is None:
            return None
        return OverlongPenalty(
            max_response_len=self._config.rollout.max_response_len,
            buffer_len=reward.overlong_buffer_len,
            factor=reward.overlong_penalty_factor,
        )

    def _lease(self, groups: Sequence[Any]) -> tuple[int, ...]:
        """Note the groups of a batch as leased, also those of rollout functions that keep no account themselves."""
        indices = sorted({s.group_index for g in groups for s in flatten(g) if s.group_index is not None})
        for index in indices:
            if self._ledger.state_of(index) is None:
                self._ledger.issue(index)
            if self._ledger.state_of(index) in ("in_flight", "partial"):
                if self._ledger.state_of(index) == "partial":
                    self._ledger.resume(index)
                self._ledger.finish(index)
        self._ledger.lease(indices)
        self._ledger.assert_balanced()
        return tuple(indices)

    async def commit(self, step: int, group_indices: Sequence[int]) -> None:
        """Every optimizer step of `step`'s batch is done."""
        self._pool.step_done()
        self._ledger.train(group_indices)
        self._settle_buffer("partial", *(() if self._keeps_groups else ("ready",)))
        self._ledger.assert_balanced()

    async def evaluate(self, step: int) -> Metrics:
        """Evaluate all datasets; their samples go to RUN_DIR/eval/."""
        assert self._eval_fn is not None
        output = await self._eval_fn(RolloutFnEvalInput(step, weight_version=self._version))
        metrics = output.metrics
        if metrics is None:
            metrics = eval_metrics(output.data, self._args.eval_reward_key)
        if self._config.eval.save_samples:
            for name, result in output.data.items():
                self._write_rows(f"eval/{name}", step, [result.get("samples", [])])
        append_results(self._run_dir / "eval.jsonl", step, self._version, output.data, metrics)
        return await self._log_evaluation(step, self._args, output.data, defaults=metrics, extra={})

    async def set_weight_version(self, version: int) -> None:
        """The engines hold `version` now."""
        self._version = version
        for fn in {id(f): f for f in (self._fn, self._eval_fn) if f}.values():
            fn.note_weight_version(version)

    async def state_dict(self) -> dict[str, Any]:
        """JSON-ready state of data source and ledger."""
        return {"data_source": self._source_state(), "ledger": self._ledger.state_dict()}

    def _source_state(self) -> dict[str, Any] | None:
        """State of the data source; one written to the reference's contract keeps its state itself, by step."""
        source: Any = self._source
        if hasattr(source, "state_dict"):
            return source.state_dict()
        source.save(self._last_step)
        return None

    def _load(self, state: dict[str, Any]) -> None:
        source: Any = self._source
        if state["data_source"] is not None:
            source.load_state_dict(state["data_source"])
        else:
            source.load(self._last_step)
        self._ledger.load_state_dict(state["ledger"])
        self._settle_buffer("partial", "ready")

    @property
    def _replays(self) -> bool:
        """Whether the samples were saved by another run, in whose ledger their groups stand."""
        return self._config.debug.load_rollout_data is not None

    @property
    def _keeps_groups(self) -> bool:
        """Whether the rollout function is the user's, which may keep groups from one step to the next."""
        return self._config.rollout.function_path != RolloutConfig().function_path

    def _settle_buffer(self, *states: LiveState) -> None:
        hooks_decide = self._keeps_groups or self._config.data.buffer_filter_path is not None
        settle_buffer(self._ledger, self._source, *states, reason="by_a_hook" if hooks_decide else None)

    def _write_rows(self, kind: str, step: int, groups: Sequence[Any]) -> None:
        name = f"{step:07d}.jsonl" if step >= 0 else "before-training.jsonl"
        path = self._run_dir / kind / name
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in dump_rows(groups))
        write_whole(path, "".join(lines))

    async def close(self) -> None:
        """End rollout function, engines and router."""
        for fn in {id(f): f for f in (self._fn, self._eval_fn) if f}.values():
            await fn.close()
        await self._pool.close()
        await http_utils.aclose()
