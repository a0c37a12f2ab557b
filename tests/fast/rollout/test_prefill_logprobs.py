import asyncio
import json
import threading
import time

import pytest
import torch
import uvicorn
from aiohttp import web
from transformers import AutoModelForCausalLM

from miles.backends.torch_engine.server import create_app
from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.run_facts import RunFacts
from miles.core.samples import Sample
from miles.errors import EngineError
from miles.rollout.base_types import RolloutFnTrainInput
from miles.rollout.generate_hub.prefill_logprobs import KEPT_FREE, recompute_log_probs
from miles.rollout.inference_rollout.state import GenerateState
from miles.utils.http_utils import HttpError
from tests.fast.rollout.scripted_engine import ScriptedEngine
from tests.fast.rollout.support import make_args, make_rollout, run
from tests.fast.torch_engine.support import Client, make_model, reference_logprobs, running_engine

CONTEXT = 64
PROMPT, RESPONSE = [5, 6, 7], [8, 9, 10, 11]


def scores(request, *, version="1", **changes):
    """What an engine answers to a scoring request: the log-prob of token t is -t / 100."""
    ids = request["input_ids"][request["logprob_start_len"] :]
    entries = [[None if place == 0 else -token / 100, token, None] for place, token in enumerate(ids)]
    meta = {"finish_reason": {"type": "length", "length": 0}, "weight_version": version}
    return {"text": "", "meta_info": {**meta, "input_token_logprobs": entries, **changes}}


def sample_of(**fields):
    values = {"tokens": PROMPT + RESPONSE, "response_length": 4, "rollout_log_probs": [-1.0, -2.0, -3.0, -4.0]}
    values |= {"version_spans": [(0, "1")], "status": Sample.Status.COMPLETED, "group_index": 4, "index": 9}
    return Sample(**{**values, **fields})


async def recomputed(tmp_path, script, *samples, **sections):
    async with ScriptedEngine(script) as engine:
        state = GenerateState(make_args(tmp_path, engine.url, **sections))
        state.weight_version = "1"
        return await recompute_log_probs(state, [list(samples)]), engine


def test_one_request_scores_the_whole_sequence_from_the_last_prompt_token_on(tmp_path):
    # Case B30: the request carries the rollout's temperature.
    async def test():
        sample = sample_of()
        metrics, engine = await recomputed(tmp_path, scores, sample, rollout={"temperature": 0.7})
        (request,) = engine.requests
        assert request.pop("rid").startswith("score-")
        assert request == {
            "input_ids": PROMPT + RESPONSE,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.7, "top_p": 1.0, "top_k": -1},
            "return_logprob": True,
            "logprob_start_len": 2,
            "extra_key": "prefill-1",
        }
        assert sample.rollout_log_probs == [-0.08, -0.09, -0.1, -0.11]
        sample.validate()
        assert metrics.pop("rollout/prefill/seconds") > 0
        assert metrics == {
            "rollout/prefill/tokens": 4.0,
            "rollout/prefill/kept_tokens": 0.0,
            "rollout/prefill/abs_diff_mean": pytest.approx((0.92 + 1.91 + 2.9 + 3.89) / 4),
            "rollout/prefill/abs_diff_p99": pytest.approx(3.89, rel=0.01),
            "rollout/prefill/abs_diff_max": pytest.approx(3.89),
        }

    run(test())


def test_tokens_of_the_environment_keep_what_they_have(tmp_path):
    async def test():
        sample = sample_of(loss_mask=[1, 0, 0, 1], rollout_log_probs=[-1.0, 0.0, 0.0, -4.0])
        metrics, _ = await recomputed(tmp_path, scores, sample)
        assert sample.rollout_log_probs == [-0.08, 0.0, 0.0, -0.11]
        assert (metrics["rollout/prefill/tokens"], metrics["rollout/prefill/kept_tokens"]) == (2.0, 0.0)

    run(test())


def test_tokens_of_an_older_version_keep_the_log_probs_of_the_policy_that_sampled_them(tmp_path):
    async def test():
        sample = sample_of(version_spans=[(0, "1"), (3, "2")])
        metrics, _ = await recomputed(tmp_path, lambda r: scores(r, version="2"), sample)
        assert sample.rollout_log_probs == [-1.0, -2.0, -3.0, -0.11]
        assert (metrics["rollout/prefill/tokens"], metrics["rollout/prefill/kept_tokens"]) == (1.0, 3.0)

    run(test())


def test_a_sample_that_came_without_log_probs_gets_them(tmp_path):
    async def test():
        sample = sample_of(loss_mask=[1, 1, 0, 1], rollout_log_probs=None, version_spans=[])
        metrics, _ = await recomputed(tmp_path, scores, sample)
        assert sample.rollout_log_probs == [-0.08, -0.09, 0.0, -0.11]
        assert "rollout/prefill/abs_diff_mean" not in metrics
        with pytest.raises(EngineError, match=r"sample 9 \(group 4\): it has no log-probs, and 4 of its 4 trained"):
            await recomputed(tmp_path, lambda r: scores(r, version="2"), sample_of(rollout_log_probs=None))

    run(test())


def test_samples_that_are_not_trained_on_are_not_scored(tmp_path):
    async def test():
        removed, masked = sample_of(remove_sample=True), sample_of(loss_mask=[0, 0, 0, 0])
        empty = sample_of(tokens=PROMPT, response_length=0, rollout_log_probs=[], version_spans=[])
        metrics, engine = await recomputed(tmp_path, scores, removed, masked, empty)
        assert engine.requests == []
        assert metrics["rollout/prefill/tokens"] == 0
        assert removed.rollout_log_probs == masked.rollout_log_probs == [-1.0, -2.0, -3.0, -4.0]

    run(test())


def changed(place, entry):
    def script(request):
        answer = scores(request)
        answer["meta_info"]["input_token_logprobs"][place] = entry
        return answer

    return script


# Case F13: the first entry has no log-prob, every other has one, and ids are those that were sent.
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (changed(2, [-0.5, 3, None]), "scored other tokens"),
        (changed(1, [None, 8, None]), r"sample 9 \(group 4\), from token 2 on: .* no log-prob for token 1"),
        (
            lambda r: scores(r, input_token_logprobs=scores(r)["meta_info"]["input_token_logprobs"][:-1]),
            "other tokens",
        ),
        (lambda r: scores(r, input_token_logprobs=None), "no input_token_logprobs"),  # Case F12.
        (lambda r: scores(r, weight_version=None), "which weight_version"),
        (lambda r: scores(r, finish_reason={"type": "abort", "status_code": 400, "message": "too odd"}), "too odd"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_and_changes_nothing(tmp_path, script, told):
    async def test():
        def as_json(request):
            return web.Response(text=json.dumps(script(request)), content_type="application/json")

        sample = sample_of()
        with pytest.raises(EngineError, match=told):
            await recomputed(tmp_path, as_json, sample)
        assert sample.rollout_log_probs == [-1.0, -2.0, -3.0, -4.0]

    run(test())


def test_a_request_that_an_update_aborts_is_sent_again(tmp_path):
    async def test():
        answers = iter([{"type": "abort"}, {"type": "abort"}, {"type": "length"}])
        sample = sample_of()
        _, engine = await recomputed(tmp_path, lambda r: scores(r, finish_reason=next(answers)), sample)
        assert sample.rollout_log_probs == [-0.08, -0.09, -0.1, -0.11]
        assert len({r["rid"] for r in engine.requests}) == 3

    run(test())


def test_a_response_at_the_end_of_the_context_that_the_engine_takes_for_no_prompt_keeps_its_log_probs(tmp_path):
    async def test():
        def refuse(request):
            return web.json_response({"error": {"message": "Input length exceeds"}}, status=400)

        full = CONTEXT - KEPT_FREE + 1
        sample = sample_of(tokens=[5] * (full - 4) + RESPONSE)
        metrics, _ = await recomputed(tmp_path, refuse, sample)
        assert sample.rollout_log_probs == [-1.0, -2.0, -3.0, -4.0]
        assert (metrics["rollout/prefill/tokens"], metrics["rollout/prefill/kept_tokens"]) == (0.0, 4.0)
        with pytest.raises(HttpError, match="answered 400"):
            await recomputed(tmp_path, refuse, sample_of(tokens=[5] * (full - 5) + RESPONSE))

    run(test())


def test_a_response_without_a_prompt_is_refused(tmp_path):
    async def test():
        with pytest.raises(EngineError, match=r"sample 9 .*has no prompt"):
            await recomputed(tmp_path, scores, sample_of(tokens=RESPONSE))

    run(test())


# ---- against the torch engine


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    with running_engine(folder) as engine:
        server = uvicorn.Server(uvicorn.Config(create_app(engine), port=0, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield folder, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


def rollout_args(served, tmp_path, **rollout):
    folder, url = served
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input": f"count {i}", "label": "9"}) + "\n" for i in range(4)))
    base = {"batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 1, "max_response_len": 40, "temperature": 0.7}
    sections = {
        "model": {"hf_checkpoint": str(folder)},
        "data": {"prompt_data": str(data), "label_key": "label"},
        "rollout": {**base, **rollout},
        "reward": {"rm_type": "exact"},
    }
    return HookArgs(RunConfig.model_validate(sections), RunFacts(router_url=url))


async def batch_of(args):
    rollout = make_rollout(args)
    output = await rollout(RolloutFnTrainInput(0))
    await rollout.close()
    return [s for group in output.samples for s in group], output.metrics


def spoil(args, sample, **_):
    sample.rollout_log_probs = [x - 1 for x in sample.rollout_log_probs]


def test_a_rollout_with_the_flag_has_the_log_probs_of_a_whole_pass_at_its_temperature(served, tmp_path):
    async def test():
        hook = [f"{__name__}.spoil"]
        args = rollout_args(served, tmp_path, sample_hook_path=hook, recompute_logprobs_via_prefill=True)
        samples, metrics = await batch_of(args)
        assert metrics["rollout/prefill/tokens"] == sum(s.response_length for s in samples) > 100
        assert metrics["rollout/prefill/abs_diff_mean"] == pytest.approx(1, abs=1e-4)
        model = AutoModelForCausalLM.from_pretrained(served[0])
        for sample in samples:
            whole = reference_logprobs(model, sample.tokens, 0.7)
            torch.testing.assert_close(
                torch.tensor(sample.rollout_log_probs), whole[-sample.response_length :], atol=1e-4, rtol=0
            )

    run(test())


def test_a_rollout_without_the_flag_keeps_what_engines_said_while_they_sampled(served, tmp_path):
    async def test():
        plain, metrics = await batch_of(rollout_args(served, tmp_path))
        spoilt, _ = await batch_of(rollout_args(served, tmp_path, sample_hook_path=[f"{__name__}.spoil"]))
        assert not any(name.startswith("rollout/prefill/") for name in metrics)
        for before, after in zip(plain, spoilt, strict=True):
            torch.testing.assert_close(
                torch.tensor(before.rollout_log_probs), torch.tensor(after.rollout_log_probs) + 1
            )

    run(test())


def test_other_requests_run_while_responses_are_scored(served, tmp_path):
    async def test():
        client = Client(served[1])
        long = asyncio.create_task(asyncio.to_thread(client.generate, PROMPT, 200, ignore_eos=True))
        samples, metrics = await batch_of(rollout_args(served, tmp_path, recompute_logprobs_via_prefill=True))
        assert metrics["rollout/prefill/tokens"] == sum(s.response_length for s in samples)
        assert (await long)["meta_info"]["completion_tokens"] == 200

    run(test())
