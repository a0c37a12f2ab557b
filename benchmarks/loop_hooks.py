"""What a benchmarked run loads: responses of full length, and passes over the bare engine between its own rollouts."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from miles.rollout.base_types import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.generate_hub import single_turn
from miles.rollout.inference_rollout import InferenceRolloutFn

Request = tuple[list[int], dict[str, Any]]
"""Prompt ids and sampling parameters of one request."""

_REQUESTS: list[Request] = []


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """A single turn that no end-of-sequence id ends; what was asked for is kept for the pass over the bare engine."""
    input.sampling_params["ignore_eos"] = True
    prompt_T = list(input.sample.tokens)
    _REQUESTS.append((prompt_T, dict(input.sampling_params)))
    return await single_turn.generate(input)


class RawBesideMiles(InferenceRolloutFn):
    """The rollout of a run. In steps 1 to `--bench-pairs` it also sends the requests of a rollout to the engine itself.

    In odd steps the bare pass comes after the rollout and repeats its requests; in even steps it comes before, and
    repeats those of the step before. Metrics: `bench/raw_s`, `bench/raw_tokens`, `bench/miles_s`.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """The flag of this rollout."""
        parser.add_argument("--bench-pairs", type=int, default=0, help="steps that pass over the bare engine too")

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        super().__init__(input)
        self._pairs: int = self.args.bench_pairs
        self._run_dir = Path(self.args.run_dir)

    async def __call__(
        self, input: RolloutFnTrainInput | RolloutFnEvalInput
    ) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
        """A batch, with the seconds it took; and those of the bare pass, in steps that make one."""
        if isinstance(input, RolloutFnEvalInput):
            return await super().__call__(input)
        found: dict[str, float] = {}
        paired = 1 <= input.rollout_id <= self._pairs
        if paired and input.rollout_id % 2 == 0:
            found |= await self._raw_pass()
        _REQUESTS.clear()
        started = time.monotonic()
        output = await super().__call__(input)
        assert isinstance(output, RolloutFnTrainOutput)
        found["bench/miles_s"] = time.monotonic() - started
        if paired and input.rollout_id % 2:
            found |= await self._raw_pass()
        return RolloutFnTrainOutput(samples=output.samples, metrics={**(output.metrics or {}), **found})

    async def _raw_pass(self) -> dict[str, float]:
        url = await engine_url(self._run_dir / "events.jsonl")
        seconds, tokens = await raw_pass(url, list(_REQUESTS))
        return {"bench/raw_s": seconds, "bench/raw_tokens": float(tokens)}


async def raw_pass(url: str, requests: list[Request]) -> tuple[float, int]:
    """Seconds until the engine at `url` has answered all `requests`, sent at once, and the tokens it made.

    A cache key of its own keeps the engine from reusing prompts that it knows from the rollout; the samples of one
    prompt share theirs, as in the rollout. Raises RuntimeError for an answer that is none.
    """
    key = uuid.uuid4().hex
    bodies = [
        orjson.dumps({"input_ids": ids, "sampling_params": params, "return_logprob": True, "extra_key": key})
        for ids, params in requests
    ]
    timeout, headers = aiohttp.ClientTimeout(total=None), {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def ask(body: bytes) -> bytes:
            async with session.post(f"{url}/generate", data=body, headers=headers) as response:
                content = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"the engine at {url} answered {response.status}: {content[:300]!r}")
                return content

        started = time.monotonic()
        answers = await asyncio.gather(*map(ask, bodies))
        seconds = time.monotonic() - started
    return seconds, sum(orjson.loads(answer)["meta_info"]["completion_tokens"] for answer in answers)


async def engine_url(events: Path) -> str:
    """Address of the run's first engine: the port on which its process, named in `events`, answers `/model_info`."""
    rows = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    pid = next(row["pids"]["engine-0"] for row in rows if row["event"] == "started")
    connections = psutil.Process(pid).net_connections(kind="tcp")
    ports = sorted({c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN})
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for port in ports:
            url = f"http://127.0.0.1:{port}"
            try:
                async with session.get(f"{url}/model_info") as response:
                    if response.status == 200:
                        return url
            except (aiohttp.ClientError, TimeoutError):
                continue  # another of the engine's ports, which does not speak HTTP
    raise RuntimeError(f"none of the ports {ports} of the engine's process {pid} answers /model_info")
