"""The rollout against the project's own engine: reproducible, exact about versions, and true to the model."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM

from miles.backends.torch_engine.engine import Engine
from miles.backends.torch_engine.server import create_app
from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.run_facts import RunFacts
from miles.rollout.base_types import RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from tests.fast.rollout.support import make_rollout, run
from tests.fast.torch_engine.support import Client, make_model, reference_logprobs, running_engine

LENGTH = 48


class Served:
    def __init__(self, engine: Engine, url: str, folder: Path) -> None:
        self.engine, self.url, self.folder = engine, url, folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_model(tmp_path_factory.mktemp("model"))
    with running_engine(folder) as engine:
        server = uvicorn.Server(uvicorn.Config(create_app(engine), port=0, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Served(engine, f"http://127.0.0.1:{port}", folder)
        server.should_exit = True
        thread.join(10)


def args_of(served: Served, tmp_path: Path, **rollout: Any) -> HookArgs:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input": f"count {i}", "label": "9"}) + "\n" for i in range(4)))
    base = {"batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 1, "max_response_len": LENGTH}
    sections = {
        "model": {"hf_checkpoint": str(served.folder)},
        "data": {"prompt_data": str(data), "label_key": "label"},
        "rollout": {**base, **rollout},
        "reward": {"rm_type": "exact"},
    }
    return HookArgs(RunConfig.model_validate(sections), RunFacts(router_url=served.url))


async def batch_of(args: HookArgs, during: Any = None) -> list[Any]:
    rollout = make_rollout(args, RolloutDataSourceWithBuffer(args))
    step = asyncio.create_task(rollout(RolloutFnTrainInput(0)))
    if during:
        await during(step)
    output = await step
    await rollout.close()
    return [s for group in output.samples for s in group]


def test_two_runs_of_one_seed_give_the_same_tokens_and_another_seed_others(served, tmp_path):
    async def test():
        first, again = [await batch_of(args_of(served, tmp_path)) for _ in range(2)]
        other = await batch_of(args_of(served, tmp_path, seed=7))
        assert [s.tokens for s in first] == [s.tokens for s in again]
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(torch.tensor(a.rollout_log_probs), torch.tensor(b.rollout_log_probs))
        assert [s.tokens for s in first] != [s.tokens for s in other]
        assert len({tuple(s.tokens) for s in first}) == 8

    run(test())


def test_log_probs_are_those_of_the_model_under_the_rollout_temperature(served, tmp_path):
    async def test():
        samples = await batch_of(args_of(served, tmp_path, temperature=0.7))
        model = AutoModelForCausalLM.from_pretrained(served.folder)
        for sample in samples:
            whole = reference_logprobs(model, sample.tokens, 0.7)
            torch.testing.assert_close(
                torch.tensor(sample.rollout_log_probs), whole[-sample.response_length :], atol=1e-4, rtol=0
            )

    run(test())


def test_a_drained_update_in_the_middle_loses_no_token_and_marks_the_versions(served, tmp_path):
    async def test():
        client = Client(served.url)
        undisturbed = await batch_of(args_of(served, tmp_path))

        async def update(step):
            while not any(len(r.output_ids) > 4 for r in list(served.engine._running)):
                assert not step.done()
                await asyncio.sleep(0.001)
            for path, body in (
                ("/pause_generation", {"mode": "abort"}),
                ("/update_weight_version", {"new_version": "8", "abort_all_requests": False}),
                ("/continue_generation", {}),
            ):
                status, answer = await asyncio.to_thread(client.post, path, body)
                assert status == 200, answer

        samples = await batch_of(args_of(served, tmp_path), update)
        assert [s.tokens for s in samples] == [s.tokens for s in undisturbed]
        assert [s.response for s in samples] == [s.response for s in undisturbed]
        mixed = [s for s in samples if len(s.version_spans) == 2]
        assert mixed
        for sample in samples:
            sample.validate()
            assert sample.weight_versions[-1] == "8" or len(sample.version_spans) == 1
        assert all(0 < s.version_spans[1][0] < s.response_length for s in mixed)

    run(test())
