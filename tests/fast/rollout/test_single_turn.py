import asyncio
import copy
import itertools
import re

import orjson
import pytest
from aiohttp import web

from miles.core.samples import Sample
from miles.errors import EngineError
from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub.single_turn import MAX_EMPTY_ABORTS, append_reply, generate, response_budget
from miles.rollout.inference_rollout.compatibility import RolloutFnAdapter
from miles.rollout.inference_rollout.state import GenerateState, sampling_seed
from miles.utils.http_utils import MOST_BREAKS, TransportError
from tests.fast.rollout.scripted_engine import ScriptedEngine, reply
from tests.fast.rollout.support import END, ids, make_args, make_rollout, run


def sample_of(prompt="1+1=", **fields):
    return Sample(group_index=4, index=9, prompt=prompt, tokens=ids(prompt), label="2", **fields)


async def generate_once(tmp_path, script, sample=None, prepare=None, **sections):
    async with ScriptedEngine(script) as engine:
        state = GenerateState(make_args(tmp_path, engine.url, **sections))
        if prepare:
            prepare(state)
        sample = sample or sample_of()
        output = await generate(GenerateFnInput(state, sample, state.params_for(sample)))
        return output.samples, engine


def test_the_request_states_every_sampling_parameter(tmp_path):
    async def test():
        sections = {"rollout": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["?"], "stop_token_ids": [3]}}
        _, engine = await generate_once(tmp_path, lambda r: reply(ids("2")), **sections)
        (request,) = engine.requests
        assert request["input_ids"] == ids("1+1=")
        assert request["return_logprob"] is True
        assert request["sampling_params"] == {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "max_new_tokens": 8,
            "min_new_tokens": 0,
            "stop": ["?"],
            "stop_token_ids": [3],
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "sampling_seed": sampling_seed(42, 9),
        }

    run(test())


def test_tokens_and_log_probs_are_the_engines_own(tmp_path):
    async def test():
        # "2" could also be read as other ids by a tokenizer; what the engine says counts, text or not
        answer = reply([11, 12, END], log_probs=[-0.1, -0.2, -0.3], text="2", version="7", cached_tokens=2)
        sample, _ = await generate_once(tmp_path, lambda r: answer)
        assert sample.tokens == [*ids("1+1="), 11, 12, END]
        assert sample.rollout_log_probs == [-0.1, -0.2, -0.3]
        assert (sample.response, sample.response_length) == ("2", 3)
        assert sample.version_spans == [(0, "7")]
        assert sample.cached_tokens == 2
        assert sample.status is Sample.Status.COMPLETED
        sample.validate()

    run(test())


# Cases E06, E13.
@pytest.mark.parametrize(
    ("finish", "status"), [("stop", Sample.Status.COMPLETED), ("length", Sample.Status.TRUNCATED)]
)
def test_how_it_ended_follows_the_finish_reason_and_never_the_last_token(tmp_path, finish, status):
    async def test():
        for last in (99, END):
            sample, _ = await generate_once(tmp_path, lambda r, last=last: reply([5, last], finish=finish))
            assert sample.status is status

    run(test())


def test_a_request_aborted_by_an_update_goes_on_from_its_tokens_with_exact_versions(tmp_path):
    replies = [
        reply(ids("ab"), finish="abort", version="1"),
        reply([], finish="abort", version="2", output_token_logprobs=None),
        reply(ids("c"), finish="abort", version="2"),
        reply([*ids("d"), END], version="3"),
    ]

    async def test():
        sample, engine = await generate_once(tmp_path, lambda r: copy.deepcopy(replies[len(engine_requests(r))]))
        assert [r["input_ids"] for r in engine.requests] == [
            ids("1+1="),
            ids("1+1=ab"),
            ids("1+1=ab"),
            ids("1+1=abc"),
        ]
        assert [r["sampling_params"]["max_new_tokens"] for r in engine.requests] == [8, 6, 6, 5]
        assert len({r["rid"] for r in engine.requests}) == 4
        assert len({r["sampling_params"]["sampling_seed"] for r in engine.requests}) == 1
        assert sample.version_spans == [(0, "1"), (2, "2"), (3, "3")]
        assert sample.tokens == [*ids("1+1=abcd"), END]
        assert len(sample.rollout_log_probs) == 5
        assert sample.response.replace(" ", "") == "abcd<|end|>"
        assert sample.status is Sample.Status.COMPLETED

    seen: list[str] = []

    def engine_requests(request):
        seen.append(request["rid"])
        return seen[1:]

    run(test())


def test_a_request_that_goes_on_owes_only_what_is_left_of_its_least_length(tmp_path):
    replies = [reply(ids("ab"), finish="abort"), reply(ids("cd"), finish="abort"), reply([*ids("e"), END])]

    async def test():
        async with ScriptedEngine(lambda r: replies[len(engine.requests) - 1]) as engine:
            state = GenerateState(make_args(tmp_path, engine.url))
            sample = sample_of()
            await generate(GenerateFnInput(state, sample, {**state.params_for(sample), "min_new_tokens": 3}))
            await state.close()
            assert [r["sampling_params"]["min_new_tokens"] for r in engine.requests] == [3, 1, 0]

    run(test())


def test_a_request_aborted_when_its_budget_is_spent_is_truncated(tmp_path):
    async def test():
        sample, engine = await generate_once(tmp_path, lambda r: reply([5] * 8, finish="abort"))
        assert len(engine.requests) == 1
        assert sample.status is Sample.Status.TRUNCATED

    run(test())


def test_endless_aborts_without_a_token_are_an_error(tmp_path, monkeypatch):
    assert MAX_EMPTY_ABORTS > 100
    monkeypatch.setattr("miles.rollout.generate_hub.single_turn.MAX_EMPTY_ABORTS", 5)

    async def test():
        with pytest.raises(EngineError, match="sample 9 was aborted 5 times without a token"):
            await generate_once(tmp_path, lambda r: reply([], finish="abort"))

    run(test())


def test_an_abort_while_the_surplus_is_cancelled_stays_aborted(tmp_path):
    def prepare(state):
        state.aborted = True

    async def test():
        sample, engine = await generate_once(tmp_path, lambda r: reply(ids("a"), finish="abort"), prepare=prepare)
        assert sample.status is Sample.Status.ABORTED
        assert len(engine.requests) == 1

    run(test())


def streamed(*chunks, done=True):
    events = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return web.Response(
        body=b"".join([*events, b"data: [DONE]\n\n" if done else b""]), content_type="text/event-stream"
    )


IN_PLACE = {"weights": {"mode": "in_place"}}


def test_a_streamed_reply_tells_for_each_token_the_version_that_sampled_it(tmp_path):
    chunks = [
        reply(ids("a"), version="1", finish_reason=None),
        reply(ids("ab"), version="1", finish_reason=None),
        reply(ids("abc"), version="2", finish_reason=None),
        reply(ids("abc"), version="3", finish_reason=None),
        reply([*ids("abcde"), END], text="abcde<|end|>", version="4", cached_tokens=3),
    ]

    def prepare(state):
        state.weight_version = "1"

    async def test():
        sample, engine = await generate_once(tmp_path, lambda r: streamed(*chunks), prepare=prepare, **IN_PLACE)
        (request,) = engine.requests
        assert (request["stream"], request["extra_key"]) == (True, "1")
        assert sample.version_spans == [(0, "1"), (2, "2"), (3, "4")]
        assert sample.tokens == [*ids("1+1=abcde"), END]
        assert len(sample.rollout_log_probs) == 6
        assert (sample.response, sample.status) == ("abcde<|end|>", Sample.Status.COMPLETED)
        assert sample.cached_tokens == 3
        sample.validate()

    run(test())


def test_a_published_version_reaches_the_requests_of_a_rollout_class_that_wants_it(tmp_path):
    rollout = make_rollout(make_args(tmp_path))
    assert rollout.state.weight_version is None
    RolloutFnAdapter("a.Class", rollout, rollout).note_weight_version(3)
    assert rollout.state.weight_version == "3"
    RolloutFnAdapter("a.function", rollout).note_weight_version(4)
    assert rollout.state.weight_version == "3"


def test_requests_are_not_streamed_when_updates_drain(tmp_path):
    async def test():
        _, engine = await generate_once(tmp_path, lambda r: reply([END]))
        assert not {"stream", "extra_key"} & engine.requests[0].keys()

    run(test())


def test_a_streamed_reply_that_is_aborted_goes_on_like_any_other(tmp_path):
    answers = [
        streamed(reply(ids("a"), finish_reason=None), reply(ids("ab"), version="1", finish="abort")),
        streamed(reply([*ids("c"), END], version="2")),
    ]

    async def test():
        sample, engine = await generate_once(tmp_path, lambda r: answers.pop(0), **IN_PLACE)
        assert [r["input_ids"] for r in engine.requests] == [ids("1+1="), ids("1+1=ab")]
        assert sample.version_spans == [(0, "1"), (2, "2")]
        assert sample.tokens == [*ids("1+1=abc"), END]

    run(test())


def test_a_stream_that_breaks_off_goes_on_from_the_tokens_that_came(tmp_path):
    answers = [
        streamed(reply(ids("a"), version="1", finish_reason=None), done=False),
        streamed(reply(ids("b"), version="1", finish_reason=None), done=False),
        streamed(reply([*ids("c"), END], version="2")),
    ]

    async def test():
        sample, engine = await generate_once(tmp_path, lambda r: answers.pop(0), **IN_PLACE)
        assert [r["input_ids"] for r in engine.requests] == [ids("1+1="), ids("1+1=a"), ids("1+1=ab")]
        assert [r["sampling_params"]["max_new_tokens"] for r in engine.requests] == [8, 7, 6]
        assert sample.version_spans == [(0, "1"), (2, "2")]
        assert sample.tokens == [*ids("1+1=abc"), END]
        assert sample.response.replace(" ", "") == "abc<|end|>"

    run(test())


def test_a_stream_that_keeps_breaking_or_breaks_before_a_token_is_an_error(tmp_path):
    async def test():
        for chunks, requests in (([reply(ids("a"), finish_reason=None)], MOST_BREAKS + 1), ([], 1)):
            asked = []

            def answer(request, chunks=chunks, asked=asked):
                asked.append(request)
                return streamed(*chunks, done=False)

            with pytest.raises(TransportError, match="ended before its last event"):
                await generate_once(tmp_path, answer, **IN_PLACE)
            assert len(asked) == requests

    run(test())


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([reply([5, 6], finish_reason=None), reply([5])], "a chunk of 1 completion_tokens followed one of 2"),
        ([reply([5], weight_version=None)], "a chunk does not say which weight_version"),
        ([{"text": "?"}], "has no meta_info"),
        ([reply([5], finish_reason=None)], "finish_reason is {}"),
        ([reply([5, 6], output_token_logprobs=None)], "log-probs were requested but are missing"),  # F12
        ([], "has no meta_info but is 'None'"),
    ],
)
def test_a_stream_that_cannot_be_trusted_names_the_request(tmp_path, chunks, message):
    async def test():
        with pytest.raises(EngineError, match=r"request 4-9-.* \(sample 9\): .*" + re.escape(message)):
            await generate_once(tmp_path, lambda r: streamed(*chunks), **IN_PLACE)

    run(test())


@pytest.mark.parametrize(
    ("max_new", "prompt", "context", "want"), [(8, 4, None, 8), (8, 4, 64, 8), (8, 60, 64, 4), (8, 64, 64, 0)]
)
def test_the_response_must_fit_the_context(max_new, prompt, context, want):
    assert response_budget(max_new, prompt, context) == want


def test_the_models_context_caps_the_response(tmp_path):
    async def test():
        sample, engine = await generate_once(
            tmp_path,
            lambda r: reply([5] * r["sampling_params"]["max_new_tokens"], finish="length"),
            sample_of("1" * 61),
        )
        assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 3
        assert len(sample.tokens) == 64

    run(test())


def test_a_prompt_that_fills_the_context_is_truncated_without_a_request(tmp_path):
    async def test():
        sections = {"rollout": {"max_context_len": 4}}
        sample, engine = await generate_once(tmp_path, lambda r: reply(ids("2")), **sections)
        assert engine.requests == []
        assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 0)

    run(test())


def test_a_prompt_without_ids_is_encoded_with_the_runs_template_settings(tmp_path):
    async def test():
        chat = Sample(group_index=0, index=0, prompt=[{"role": "user", "content": "hi"}])
        _sample, engine = await generate_once(tmp_path, lambda r: reply([END]), chat)
        assert engine.requests[0]["input_ids"] == [2, *ids("hi"), 1, *ids(" "), 3]
        closed = Sample(group_index=0, index=0, prompt=[{"role": "user", "content": "hi"}])
        sections = {"data": {"apply_chat_template_kwargs": {"add_generation_prompt": False}}}
        _, engine = await generate_once(tmp_path, lambda r: reply([END]), closed, **sections)
        assert engine.requests[0]["input_ids"] == [2, *ids("hi"), 1, *ids(" ")]

    run(test())


BAD_REPLIES = {
    "log-probs were requested but are missing": reply([5, 6], output_token_logprobs=None),
    "missing: None completion_tokens": {"output_ids": [5, 6], "meta_info": {"output_token_logprobs": None}},  # F12
    "2 completion_tokens but 1 entries": reply([5, 6], output_token_logprobs=[[-0.5, 5, None]]),
    "None completion_tokens": reply([5], completion_tokens=None),
    "log-prob of output token 1 is None": reply([5, 6], log_probs=[-0.5, None]),
    "9 tokens were returned but at most 8": reply([5] * 9),
    "finish_reason is": reply([5], finish="tired"),
    "finish_reason is {}": reply([5], finish_reason=None),
    "refused by the engine: too long": reply(
        [], finish_reason={"type": "abort", "message": "too long", "status_code": 400}
    ),
    "has no meta_info": {"error": "out of memory"},
    "name different tokens": {**reply([5, 6]), "output_ids": [5, 7]},
}


@pytest.mark.parametrize("message", BAD_REPLIES)
def test_a_reply_that_cannot_be_trusted_names_the_request(message):
    with pytest.raises(EngineError, match="request r1 .*" + re.escape(message)):
        append_reply(sample_of(), BAD_REPLIES[message], "r1", 8)


def test_a_reply_without_weight_version_is_an_error():
    answer = reply([5])
    del answer["meta_info"]["weight_version"]
    with pytest.raises(EngineError, match="weight_version"):
        append_reply(sample_of(), answer, "r1", 8)


def test_an_error_of_the_engine_shows_its_text(tmp_path):
    async def test():
        with pytest.raises(EngineError, match=r"400.*prompt is too long"):
            await generate_once(tmp_path, lambda r: web.Response(status=400, text="prompt is too long"))

    run(test())


def test_seeds_differ_between_samples_and_repeat_between_runs():
    seeds = [sampling_seed(42, index) for index in range(20_000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [sampling_seed(42, index) for index in range(20_000)]
    assert sampling_seed(43, 0) != seeds[0]
    assert sampling_seed(42, 0, "eval/gsm") != seeds[0]


def test_neighbouring_samples_have_seeds_far_apart():
    seeds = [sampling_seed(0, index) for index in range(1000)]
    steps = [abs(a - b) for a, b in itertools.pairwise(seeds)]
    assert sum(step < 2**16 for step in steps) < 10


def test_requests_in_flight_stay_within_the_engines_concurrency(tmp_path):
    async def test():
        async def slow(request):
            await asyncio.sleep(0.02)
            return reply([END])

        async with ScriptedEngine(slow) as engine:
            from miles.rollout.inference_rollout.generate_and_reward import generate_sample

            state = GenerateState(
                make_args(tmp_path, engine.url, engine={"concurrency": 2}, cluster={"rollout_engines": 2})
            )
            samples = [Sample(group_index=0, index=i, tokens=[5]) for i in range(12)]
            await asyncio.gather(*(generate_sample(state, s, state.params_for(s)) for s in samples))
            assert engine.most_running == 4

    run(test())
