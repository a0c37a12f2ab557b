"""Contract tests of generate and rollout functions, against a server that answers as an engine does."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Any

from miles.core.hook_args import HookArgs
from miles.core.plugins import load_function
from miles.core.run_facts import RunFacts
from miles.core.samples import Sample
from miles.hooks.stand_in_engine import StandInEngine
from miles.hooks.trial import LoopWatch, Trial
from miles.rollout.base_types import (
    GenerateFnInput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnTrainInput,
)
from miles.rollout.groups import flatten
from miles.rollout.inference_rollout.compatibility import RolloutFnAdapter, load_generate_fn, load_rollout_fn
from miles.rollout.inference_rollout.state import GenerateState, current_state
from miles.rollout.train_data_conversion import to_train_batch
from miles.utils import http_utils
from miles.utils.chat_template_utils import encode_prompt
from miles.utils.hf import load_tokenizer

NO_MODEL = "it needs a tokenizer: add --hf-checkpoint MODEL_FOLDER, or the recipe of the run"
NO_DATA = "it needs prompts: add --prompt-data FILE, or the recipe of the run"


def _with_engine(trial: Trial, engine: StandInEngine) -> HookArgs:
    address = f"http://127.0.0.1:{engine.port}"
    facts = RunFacts(router_url=address, sglang_router_ip="127.0.0.1", sglang_router_port=engine.port)
    return HookArgs(trial.config, facts)


async def generate(trial: Trial) -> None:
    """A generate function: fills samples so that they can be trained on, for training and evaluation."""
    if not trial.config.model.hf_checkpoint:
        trial.report.begin("generates with an engine")
        trial.report.not_run(NO_MODEL)
        return
    tokenizer = load_tokenizer(trial.config.model.hf_checkpoint, trial.config.model.chat_template_path)
    async with StandInEngine(tokenizer) as engine:
        state = GenerateState(_with_engine(trial, engine), tokenizer=tokenizer)
        function = load_generate_fn(trial.path)
        finished: list[Any] = []
        async with LoopWatch() as watch:
            for evaluation in (False, True):
                sample = _prompt(trial, tokenizer, index=int(evaluation))
                input = GenerateFnInput(
                    state=state, sample=sample, sampling_params=state.params_for(sample), evaluation=evaluation
                )
                current_state.set(state)
                trial.report.begin("generates, in evaluation" if evaluation else "generates, in training")
                try:
                    output = await trial.call(input, fn=function)
                    _judge(trial, sample, list(flatten(output.samples)), engine)
                    finished.append(output.samples)
                except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                    trial.raised(error, wanted="return a finished sample, or several of one trajectory")
        watch.judge(trial.report)
        trial.sendable("a sample", finished)
        await state.close()
        await http_utils.aclose()


def _prompt(trial: Trial, tokenizer: Any, index: int) -> Sample:
    sample = copy.deepcopy(trial.prompts[0])
    sample.group_index, sample.index = 0, index
    if not sample.tokens:
        sample.tokens = list(encode_prompt(tokenizer, sample.prompt, trial.config.data.apply_chat_template_kwargs))
    return sample


def _judge(trial: Trial, prompt: Sample, samples: list[Sample], engine: StandInEngine) -> None:
    finished = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    for sample in samples:
        sample.validate()
    unfinished = [s.status.value for s in samples if s.status not in finished]
    unseeded = [r for r in engine.requests if (r.get("sampling_params") or {}).get("sampling_seed") is None]
    if unfinished:
        trial.report.fails(f"returned a sample with the status {unfinished[0]}", "set COMPLETED or TRUNCATED")
    elif not any(s.effective_response_length for s in samples):
        trial.report.fails("no token can be trained on", "append the engine's tokens with sample.append_response")
    elif any(s.rollout_log_probs is None for s in samples):
        mend = 'ask for "return_logprob": true, and keep them in sample.rollout_log_probs'
        trial.report.fails("returned no rollout_log_probs, so the trainer cannot be compared with the engine", mend)
    elif any(prompt.group_index != s.group_index for s in samples if s.group_index is not None):
        trial.report.fails("returned a sample of another group", "keep sample.group_index")
    elif unseeded:
        trial.report.note(
            "sent a request without sampling_seed; --deterministic-mode needs it: pass sampling_params on"
        )
    else:
        lengths = ", ".join(str(s.response_length) for s in samples)
        trial.report.ok(
            f"{len(samples)} sample(s) of {lengths} response tokens, {len(engine.requests)} request(s) so far"
        )


async def rollout(trial: Trial) -> None:
    """A rollout function: a batch that can be trained on, from the run's own data."""
    trial.report.begin("collects a batch")
    wanted = "return RolloutFnTrainOutput(samples=groups) with --rollout-batch-size groups of finished samples"
    config = trial.config

    async def collect(function: RolloutFnAdapter) -> None:
        output = await trial.call(RolloutFnTrainInput(0, 1), fn=function)
        supervised = config.algorithm.loss_type == "sft_loss"
        batch = to_train_batch(output.samples, require_rewards=not supervised, baseline=None)
        if len(output.samples) == config.rollout.batch_size:
            trial.report.ok(f"{len(output.samples)} groups, {len(batch)} samples")
        else:
            trial.report.fails(f"returned {len(output.samples)} groups of {config.rollout.batch_size}", wanted)

    await _with_function(trial, "--rollout-function-path", collect, wanted)


async def eval_rollout(trial: Trial) -> None:
    """An evaluation function: results by dataset."""
    trial.report.begin("evaluates")
    wanted = 'return RolloutFnEvalOutput(data={"NAME": {"rewards": [...], "truncated": [...], "samples": [...]}})'

    async def evaluate(function: RolloutFnAdapter) -> None:
        output = await trial.call(RolloutFnEvalInput(0, weight_version=1), fn=function)
        short = [name for name, found in output.data.items() if "rewards" not in found]
        if short:
            trial.report.fails(f"the result of {short[0]} has no rewards", wanted)
        else:
            trial.report.ok(f"{len(output.data)} dataset(s)")

    await _with_function(trial, "--eval-function-path", evaluate, wanted)


async def _with_function(
    trial: Trial, flag: str, test: Callable[[RolloutFnAdapter], Awaitable[None]], wanted: str
) -> None:
    """Run `test` on the function, built as a run builds it, with the run's data source and a stand-in for its engines."""
    config = trial.config
    if not config.model.hf_checkpoint or not config.data.prompt_data:
        trial.report.not_run(NO_DATA if config.model.hf_checkpoint else NO_MODEL)
        return
    tokenizer = load_tokenizer(config.model.hf_checkpoint, config.model.chat_template_path)
    async with StandInEngine(tokenizer) as engine:
        args = _with_engine(trial, engine)
        function = None
        try:
            source = load_function(config.data.source_path)(args)
            function = load_rollout_fn(trial.path, RolloutFnConstructorInput(args, source), flag=flag)
            await test(function)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            trial.raised(error, wanted=wanted)
        finally:
            if function is not None:
                await function.close()
            await http_utils.aclose()
