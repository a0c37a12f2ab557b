"""`/generate` with `stream: true`: server-sent events whose chunks name the weights that sampled their new tokens."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from miles.backends.torch_engine.engine import Engine
from miles.backends.torch_engine.request import Progress, read_request
from miles.utils.http_utils import split_host_port
from tests.fast.torch_engine.support import Client, ids_of, request, running_engine

PARAMS = {"max_new_tokens": 60, "temperature": 0.8, "sampling_seed": 3, "ignore_eos": True}


class Stream:
    """One streamed request, read event by event."""

    def __init__(self, server: Client, **body: Any) -> None:
        self._connection = http.client.HTTPConnection(*split_host_port(server.url), timeout=60)
        values = {"input_ids": [3, 4, 5], "return_logprob": True, "stream": True, "sampling_params": PARAMS} | body
        self._connection.request("POST", "/generate", json.dumps(values))
        self.response = self._connection.getresponse()

    def events(self) -> Iterator[str]:
        while True:
            line = self.response.readline().decode()
            if not line:
                return
            assert line.startswith("data: ")
            assert self.response.readline() == b"\n"
            yield line.removeprefix("data: ").strip()

    def chunks(self) -> list[dict[str, Any]]:
        *chunks, end = self.events()
        assert end == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    def close(self) -> None:
        self.response.close()  # its file holds the socket open as well
        self._connection.close()


def without_time(answer: dict[str, Any]) -> dict[str, Any]:
    ignored = ("id", "e2e_latency", "cached_tokens")
    return answer | {"meta_info": {k: v for k, v in answer["meta_info"].items() if k not in ignored}}


@pytest.mark.parametrize("interval", [None, 1, 7])
def test_chunks_are_cumulative_and_the_last_is_the_answer_of_a_plain_request(
    server: Client, interval: int | None
) -> None:
    more = {"top_logprobs_num": 2, "token_ids_logprob": [5], "logprob_start_len": 0}
    plain = server.post(
        "/generate", {"input_ids": [3, 4, 5], "return_logprob": True, "sampling_params": PARAMS} | more
    )[1]
    stream = Stream(server, sampling_params=PARAMS | {"stream_interval": interval}, **more)
    assert stream.response.status == 200
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    chunks = stream.chunks()
    assert without_time(chunks[-1]) == without_time(plain)
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))
    assert len(chunks) > 1
    per_token = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
    for chunk, count in zip(chunks[:-1], counts[:-1], strict=True):
        meta = chunk["meta_info"]
        assert chunk["output_ids"] == plain["output_ids"][:count]
        assert plain["text"].startswith(chunk["text"])
        assert all(meta[name] == plain["meta_info"][name][:count] for name in per_token)
        assert meta["input_token_logprobs"] == plain["meta_info"]["input_token_logprobs"]
        assert meta["finish_reason"] is None
        assert meta["weight_version"] == plain["meta_info"]["weight_version"]


def shown_counts(engine: Engine, total: int, interval: int | None) -> list[int]:
    counts: list[int] = []
    one = request(ids_of("abc"), total)
    one.stream, one.stream_interval = True, interval
    one.show = lambda progress: counts.append(progress.count)
    engine.generate([one])
    return counts


def test_chunks_come_at_the_interval_asked_for_or_at_growing_distances(model_folder: Any) -> None:
    with running_engine(model_folder) as engine:
        assert shown_counts(engine, 9, 1) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert shown_counts(engine, 20, 6) == [1, 7, 13, 19]
        counts = shown_counts(engine, 200, None)
        assert counts[:2] == [1, 9]
        assert sum(counts) < 3 * 200


def test_tokens_so_far_are_shown_before_weights_or_version_change(model_folder: Any) -> None:
    seen: list[Progress] = []
    with running_engine(model_folder) as engine:
        one = request(ids_of("abc"), 240, stop_ids=frozenset())
        one.stream, one.stream_interval, one.show = True, 1000, seen.append
        thread = threading.Thread(target=lambda: engine.generate([one]))
        thread.start()
        switches: list[tuple[int, str]] = []
        for version in ("1", "2"):
            while len(one.output_ids) < 20 * int(version):
                time.sleep(0.001)
            engine.call(lambda: engine.pause("in_place")).result()
            switches.append((len(one.output_ids), engine.weight_version))
            engine.call(lambda version=version: engine.set_version(version, False)).result()
            engine.call(lambda version=version: engine.set_version(version, False)).result()  # nothing new to show
            engine.call(engine.resume).result()
        thread.join()
    assert [(p.count, p.weight_version) for p in seen] == [(1, "0"), *switches]
    assert one.weight_version == "2"


def test_a_stop_string_ends_the_stream_trimmed_as_ever(server: Client) -> None:
    text = server.generate([3, 4, 5], 60, **{k: v for k, v in PARAMS.items() if k != "max_new_tokens"})["text"]
    stop = text[20:22]
    chunks = Stream(server, sampling_params=PARAMS | {"stop": stop, "stream_interval": 1}).chunks()
    assert chunks[-1]["text"] == text[: text.index(stop)]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_request_that_is_refused_or_fails_at_once_has_a_status_and_no_stream(server: Client) -> None:
    for body, message in (
        ({"input_ids": [999]}, "outside the vocabulary"),
        ({"stream": 1}, "stream is 1; it must be of type bool"),
        ({"sampling_params": {"stream_interval": 0}}, "stream_interval is 0; it must be at least 1"),
    ):
        stream = Stream(server, **body)
        assert stream.response.status == 400
        assert message in json.loads(stream.response.read())["error"]["message"]
    server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    try:
        stream = Stream(server)
        assert stream.response.status == 503
        assert "KV cache is released" in json.loads(stream.response.read())["error"]["message"]
    finally:
        server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})


def test_an_abort_ends_the_stream_with_the_tokens_so_far(server: Client) -> None:
    stream = Stream(server, sampling_params=PARAMS | {"max_new_tokens": 250})
    events = stream.events()
    next(events)
    server.post("/abort_request", {"abort_all": True})
    *_, last, done = events
    assert done == "[DONE]"
    answer = json.loads(last)
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < meta["completion_tokens"] == len(answer["output_ids"]) == len(meta["output_token_logprobs"]) < 250


def test_a_client_that_goes_away_aborts_its_stream(server: Client) -> None:
    before = server.get("/server_info")[1]["counters"]["aborted"]
    stream = Stream(server, sampling_params=PARAMS | {"max_new_tokens": 250})
    next(stream.events())
    stream.close()
    deadline = time.monotonic() + 10
    while server.get("/server_info")[1]["counters"]["aborted"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_reading_a_request_takes_the_interval_out_of_the_sampling_parameters(model_folder: Any) -> None:
    with running_engine(model_folder) as engine:
        body = {"input_ids": [3], "stream": True, "sampling_params": {"stream_interval": 4}}
        read = read_request(body, engine.model, lambda finished: None)
    assert (read.stream, read.stream_interval) == (True, 4)
