"""One engine: started as a run starts it, asked for responses, asked to score them, ended."""

from __future__ import annotations

import random
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles.config.resources import engine_backend, machine_gpus, resolved_device
from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.plugins import load_function
from miles.core.run_facts import RunFacts
from miles.core.samples import Sample
from miles.errors import MilesError
from miles.parity.options import Comparison
from miles.ray.commands import engine_command
from miles.rollout.generate_hub.prefill_logprobs import KEPT_FREE, score_by_prefill
from miles.rollout.generate_hub.single_turn import append_reply, response_budget
from miles.rollout.inference_rollout.state import sampling_params_of, sampling_seed
from miles.utils import http_utils
from miles.utils.async_utils import gather_or_cancel
from miles.utils.hf import context_length
from miles.utils.model_dtype import model_config
from miles.utils.process import TOKEN_VARIABLE, ServerProcess

SEED = 20240711
"""Of random prompts, which are the same for every engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A response with what its engine says of its R tokens, in nats."""

    tokens: list[int]
    decoded: list[float]
    """Log-probs that came with the tokens as they were sampled."""
    prefilled: list[float] | None
    """Those of a second pass over the whole sequence; None where the engine cannot at this temperature."""

    @property
    def start(self) -> int:
        """Where the response starts in the log-probs of tokens 1 to T - 1."""
        return len(self.tokens) - len(self.decoded) - 1


def prompts_of(comparison: Comparison) -> list[list[int]]:
    """Token ids of the prompts: of random tokens, or the first of the run's data."""
    config = comparison.engines[0].config
    if comparison.prompt_lengths:
        rng, vocab_size = random.Random(SEED), model_config(config.model.hf_checkpoint)["vocab_size"]
        lengths = [
            comparison.prompt_lengths[i % len(comparison.prompt_lengths)] for i in range(comparison.num_prompts)
        ]
        return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    groups = load_function(config.data.source_path)(_args(config)).get_samples(comparison.num_prompts)
    return [group[0].tokens for group in groups]


async def sample_from_engine(
    config: RunConfig, prompts: Sequence[Sequence[int]], *, full_length: bool, log_path: Path
) -> list[Sampled]:
    """Responses of the engine that a run with `config` would start, one to a prompt.

    With `full_length` none ends before `--rollout-max-response-len` or the context's end. Raises EngineError when the engine
    does not start or answers wrongly, and MilesError when a prompt fills the context.
    """
    rooms = [_room(config, len(prompt)) for prompt in prompts]
    gpus = machine_gpus()[: config.engine.gpus_per_engine] if resolved_device(config) == "cuda" else ()
    environment = {TOKEN_VARIABLE: secrets.token_urlsafe(24)}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    server = ServerProcess("engine", engine_command(config), log_path, env=environment)
    try:
        facts = await server.wait_ready_async(config.cluster.start_timeout_s)
        url = http_utils.url_of("127.0.0.1", facts["port"])
        jobs = zip(prompts, rooms, strict=True)
        samples = await gather_or_cancel([_respond(config, url, i, *job, full_length) for i, job in enumerate(jobs)])
        return await gather_or_cancel([_scored(config, url, sample) for sample in samples if sample.response_length])
    finally:
        await http_utils.aclose()
        server.stop()


def _room(config: RunConfig, prompt_len: int) -> int:
    """Tokens that a response may have; raises MilesError when there is room for none."""
    limit = config.rollout.max_context_len or context_length(config.model.hf_checkpoint)
    usable = None if limit is None else limit - KEPT_FREE  # what is generated must fit in as a prompt
    room = response_budget(config.rollout.max_response_len, prompt_len, usable)
    if room < 1:
        raise MilesError(
            f"a prompt of {prompt_len} tokens leaves no room for a response in {usable} tokens"
            "\n    fix: shorter --prompt-lengths, or --rollout-max-prompt-len"
        )
    return room


async def _respond(
    config: RunConfig, url: str, number: int, prompt: Sequence[int], room: int, full_length: bool
) -> Sample:
    params = {**sampling_params_of(_args(config)), "max_new_tokens": room}
    params |= {"sampling_seed": sampling_seed(config.rollout.seed, number), "ignore_eos": full_length}
    rid = f"parity-{number}-{uuid.uuid4().hex[:12]}"
    sample = Sample(index=number, tokens=list(prompt))
    payload = {"rid": rid, "input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    append_reply(sample, await http_utils.post(f"{url}/generate", payload), rid, room)
    return sample


async def _scored(config: RunConfig, url: str, sample: Sample) -> Sampled:
    prefilled = None
    start = len(sample.tokens) - sample.response_length - 1
    if engine_backend(config) != "sglang" or config.rollout.temperature == 1:
        scores = await score_by_prefill(
            url,
            sample.tokens,
            start,
            temperature=config.rollout.temperature,
            cache_key="parity",
            name=f"response {sample.index}",
        )
        prefilled = scores.log_probs
    return Sampled(tokens=sample.tokens, decoded=sample.rollout_log_probs or [], prefilled=prefilled)


def _args(config: RunConfig) -> HookArgs:
    return HookArgs(config, RunFacts(run_dir=config.run.dir or ""))


__all__ = ["Sampled", "prompts_of", "sample_from_engine"]
