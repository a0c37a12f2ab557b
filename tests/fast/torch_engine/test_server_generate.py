import json
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from miles.backends.torch_engine.request import RequestRefused, answer, read_request
from tests.fast.torch_engine.support import EOS, LETTERS, Client, ids_of, make_model, running_engine

CONTEXT = 256


def counters(server: Client) -> dict[str, int]:
    return server.get("/server_info")[1]["counters"]


def test_an_answer_carries_tokens_logprobs_text_and_accounts(server: Client) -> None:
    ids = ids_of("say abc")
    answer = server.generate(ids, 9, ignore_eos=True, temperature=0.7, top_p=1.0, top_k=-1)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 9
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(value <= 0 and text is None for value, _, text in meta["output_token_logprobs"])
    assert meta["finish_reason"] == {"type": "length", "length": 9}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (7, 9)
    assert meta["weight_version"] == server.get("/model_info")[1]["weight_version"]
    assert meta["e2e_latency"] > 0
    assert answer["text"] == "".join(LETTERS[i] for i in answer["output_ids"] if i > EOS)
    assert "input_token_logprobs" not in meta


def test_a_text_prompt_is_tokenised(server: Client) -> None:
    body = {"text": "say abc", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    status, answer = server.post("/generate", body)
    assert status == 200
    assert answer["output_ids"] == server.generate(ids_of("say abc"), 4, temperature=0)["output_ids"]
    assert "output_token_logprobs" not in answer["meta_info"]


def test_a_scoring_request_returns_a_logprob_for_every_later_prompt_token(server: Client) -> None:
    ids = ids_of("hello, 12")
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 3}
    status, answer = server.post("/generate", body | {"sampling_params": {"max_new_tokens": 0, "temperature": 0}})
    scores = answer["meta_info"]["input_token_logprobs"]
    assert status == 200
    assert [token for _, token, _ in scores] == ids[3:]
    assert scores[0][0] is None
    assert all(value < 0 for value, _, _ in scores[1:])
    assert (answer["output_ids"], answer["text"]) == ([], "")
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_prompt_scores_equal_the_logprobs_of_generation(server: Client) -> None:
    made = server.generate([4, 5, 6], 20, ignore_eos=True, temperature=0.6)
    ids = [4, 5, 6, *made["output_ids"]]
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 2}
    _, scored = server.post("/generate", body | {"sampling_params": {"max_new_tokens": 0, "temperature": 0.6}})
    values = [value for value, _, _ in scored["meta_info"]["input_token_logprobs"][1:]]
    assert values == pytest.approx([value for value, _, _ in made["meta_info"]["output_token_logprobs"]], abs=1e-4)


def test_siblings_are_prefilled_once_and_late_ones_still_hit(server: Client) -> None:
    ids = [random.Random(1).randrange(2, len(LETTERS)) for _ in range(50)]
    before = counters(server)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.generate(ids, 5), range(8)))
    late = server.generate(ids, 5)
    after = counters(server)
    assert after["prefill_tokens"] - before["prefill_tokens"] == 50
    assert sorted(a["meta_info"]["cached_tokens"] for a in answers) == [0] + [50] * 7
    assert late["meta_info"]["cached_tokens"] == 50
    assert after["cached_tokens"] - before["cached_tokens"] == 8 * 50


def test_prompts_of_different_extra_keys_share_nothing(server: Client) -> None:
    body = {"input_ids": ids_of("extra key"), "sampling_params": {"max_new_tokens": 1}}
    hits = [
        server.post("/generate", body | {"extra_key": key})[1]["meta_info"]["cached_tokens"]
        for key in ("1", "2", "1", None)
    ]
    assert hits == [0, 0, 9, 0]


def test_seeded_requests_give_the_same_tokens_alone_and_among_31_others(server: Client) -> None:
    alone = server.generate([8, 9], 30, sampling_seed=5, ignore_eos=True)["output_ids"]

    def run(index: int) -> list[int]:
        if index == 17:
            return server.generate([8, 9], 30, sampling_seed=5, ignore_eos=True)["output_ids"]
        return server.generate([8, 9, 2 + index % 20], 20 + index, ignore_eos=True)["output_ids"]

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(run, range(32)))[17] == alone


def test_a_stop_token_ends_the_output_and_is_part_of_the_tokens(server: Client) -> None:
    ids = server.generate(ids_of("stop at"), 24, temperature=0, ignore_eos=True)["output_ids"]
    stop = ids[0] if ids[0] > EOS else ids[1]
    cut = ids.index(stop) + 1
    assert EOS not in ids[:cut]
    params = {"temperature": 0, "stop_token_ids": [stop]}
    answer = server.generate(ids_of("stop at"), 24, **params)
    kept = server.generate(ids_of("stop at"), 24, no_stop_trim=True, **params)
    assert answer["output_ids"] == kept["output_ids"] == ids[:cut]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(answer["meta_info"]["output_token_logprobs"]) == cut
    assert kept["text"] == answer["text"] + LETTERS[stop]


def test_eos_ends_the_output_unless_it_is_ignored(server: Client) -> None:
    found = None
    for seed in range(60):
        answer = server.generate([5, 6], 60, sampling_seed=seed, temperature=1.5)
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            found = (seed, answer)
            break
    assert found is not None
    seed, answer = found
    assert answer["output_ids"][-1] == EOS
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    shown = server.generate(
        [5, 6], 60, sampling_seed=seed, temperature=1.5, no_stop_trim=True, skip_special_tokens=False
    )
    assert shown["text"].endswith("<eos>")
    ignored = server.generate([5, 6], 60, sampling_seed=seed, temperature=1.5, ignore_eos=True)
    assert len(ignored["output_ids"]) == 60
    assert ignored["output_ids"][: len(answer["output_ids"])] == answer["output_ids"]
    exact = server.generate([5, 6], len(answer["output_ids"]), sampling_seed=seed, temperature=1.5)
    assert exact["meta_info"]["finish_reason"]["type"] == "length"


def test_a_stop_string_across_tokens_is_matched_and_trimmed(server: Client) -> None:
    ids = server.generate([7, 7, 7], 40, ignore_eos=True, sampling_seed=2)["output_ids"]
    start = next(i for i in range(4, 30) if min(ids[i : i + 3]) > EOS)
    stop = "".join(LETTERS[i] for i in ids[start : start + 3])
    text = "".join(LETTERS[i] for i in ids if i > EOS)
    params: dict[str, Any] = {"ignore_eos": True, "sampling_seed": 2, "stop": [stop, "never there"]}
    answer = server.generate([7, 7, 7], 40, **params)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == text[: text.index(stop)]
    assert answer["output_ids"] == ids[: len(answer["output_ids"])]
    kept = server.generate([7, 7, 7], 40, no_stop_trim=True, **params)
    assert kept["text"] == text[: text.index(stop) + len(stop)]
    assert server.generate([7, 7, 7], 40, **(params | {"stop": stop}))["text"] == answer["text"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{nonsense", "not JSON"),
        ([1], "JSON object"),
        ({"input_idz": [3]}, "did you mean input_ids"),
        ({"input_ids": [3], "sampling_params": {"temprature": 1}}, "did you mean sampling_params.temperature"),
        ({"input_ids": [3], "sampling_params": {"qqqqqq": 1}}, "known are .*max_new_tokens"),
        ({"input_ids": [3], "sampling_params": [1]}, "sampling_params is a JSON object"),
        ({}, "exactly one of input_ids and text"),
        ({"input_ids": [3], "text": "a"}, "exactly one of input_ids and text"),
        ({"text": ["a", "b"]}, "several requests"),
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [[3], [4]]}, "several requests"),
        ({"input_ids": [3, 1.5]}, "flat list of integers"),
        ({"input_ids": [3, 42]}, "holds 42, outside the vocabulary of 42"),
        ({"input_ids": [-1]}, "holds -1, outside the vocabulary"),
        ({"input_ids": [3] * 300}, "has 300 tokens, the context holds 256"),
        ({"input_ids": [3] * 200, "sampling_params": {"max_new_tokens": 57}}, "257 tokens.*256.*at most 56"),
        ({"input_ids": [3], "return_routed_experts": True}, "return_routed_experts = True is not supported"),
        ({"input_ids": [3], "sampling_params": {"n": 2}}, "n = 2 is not supported"),
        ({"input_ids": [3], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty = 0.5 is not"),
        ({"input_ids": [3], "return_logprob": 1}, "return_logprob is 1; it must be of type bool"),
        ({"input_ids": [3], "logprob_start_len": 0}, "needs return_logprob"),
        ({"input_ids": [3], "return_logprob": True, "logprob_start_len": 1}, "lies outside the prompt of 1"),
        ({"input_ids": [3], "sampling_params": {"temperature": -1}}, "temperature is -1.0"),
        ({"input_ids": [3], "sampling_params": {"temperature": "hot"}}, "must be a number"),
        ({"input_ids": [3], "sampling_params": {"top_p": 0}}, "top_p is 0.0"),
        ({"input_ids": [3], "sampling_params": {"top_k": 0}}, "top_k is 0"),
        ({"input_ids": [3], "sampling_params": {"min_p": 1.5}}, "min_p is 1.5"),
        ({"input_ids": [3], "sampling_params": {"max_new_tokens": -2}}, "max_new_tokens is -2"),
        ({"input_ids": [3], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "min_new_tokens is 3"),
        ({"input_ids": [3], "sampling_params": {"stop": ["a", ""]}}, "none of them empty"),
        ({"input_ids": [3], "sampling_params": {"stop_token_ids": ["a"]}}, "list of integers"),
        ({"input_ids": [3], "sampling_params": {"stop_token_ids": [99]}}, "leaves the vocabulary"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(server: Client, body: Any, message: str) -> None:
    status, answer = server.post("/generate", body)
    assert status == 400
    assert re.search(message, answer["error"]["message"], re.DOTALL), answer


def test_fields_that_ask_for_nothing_are_accepted(server: Client) -> None:
    body = {
        "input_ids": [3],
        "stream": False,
        "return_routed_experts": False,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "lora_path": None,
        "sampling_params": {"n": 1, "repetition_penalty": 1.0, "max_new_tokens": 1, "stop": None},
    }
    assert server.post("/generate", body)[0] == 200


def test_max_new_tokens_defaults_to_what_fits(server: Client) -> None:
    body = {"input_ids": [3] * (CONTEXT - 5), "sampling_params": {"ignore_eos": True}}
    assert server.post("/generate", body)[1]["meta_info"]["completion_tokens"] == 5


def test_abort_answers_with_the_tokens_so_far(server: Client) -> None:
    def long_request(rid: str) -> Any:
        body = {"input_ids": [3, 4], "rid": rid, "return_logprob": True}
        params = {"max_new_tokens": 250, "ignore_eos": True}
        return server.post("/generate", body | {"sampling_params": params})

    with ThreadPoolExecutor(3) as pool:
        for kill, expected in (({"rid": "one"}, 1), ({"abort_all": True}, 3)):
            tasks = [
                pool.submit(long_request, rid) for rid in ("one", "two", "three")[: expected if expected > 1 else 1]
            ]
            while server.get("/server_info")[1]["num_running"] < expected:
                assert not any(task.done() for task in tasks)
            status, answer = server.post("/abort_request", kill)
            assert (status, answer["num_aborted"]) == (200, expected)
            for task in tasks:
                status, answer = task.result()
                assert status == 200
                assert answer["meta_info"]["finish_reason"]["type"] == "abort"
                assert 0 < len(answer["output_ids"]) < 250
                assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


def test_a_client_that_goes_away_aborts_its_request(server: Client) -> None:
    before = counters(server)["aborted"]
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 254, "ignore_eos": True}}).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        while server.get("/server_info")[1]["num_running"] == 0:
            time.sleep(0.001)
    deadline = time.monotonic() + 5
    while counters(server)["aborted"] == before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert counters(server)["aborted"] == before + 1
    assert server.get("/server_info")[1]["num_running"] == 0


def test_an_rid_in_flight_is_not_taken_twice(server: Client) -> None:
    body = {"input_ids": [3], "rid": "same", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    with ThreadPoolExecutor(2) as pool:
        answers = sorted((status for status, _ in pool.map(lambda _: server.post("/generate", body), range(2))))
    assert answers == [200, 400]
    assert server.post("/generate", body)[0] == 200


def test_a_model_folder_without_a_tokenizer_answers_tokens_but_refuses_text(tmp_path: Path) -> None:
    with running_engine(make_model(tmp_path, tokenizer=False)) as engine:
        for bad, message in (({"text": "a"}, "send input_ids"), ({"input_ids": [3]}, "use stop_token_ids")):
            with pytest.raises(RequestRefused, match=message):
                read_request(bad | {"sampling_params": {"stop": "x"}}, engine.model, lambda _: None)
        request = read_request(
            {"input_ids": [3], "sampling_params": {"max_new_tokens": 2}}, engine.model, lambda _: None
        )
        assert answer(engine.generate([request])[0], engine.model)["text"] == ""
