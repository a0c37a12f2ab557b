import asyncio
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from miles.core.samples import Sample
from miles.errors import ConfigError, HookError
from miles.rollout.rm_hub.remote import RemoteReward, RemoteRewardError
from miles.rollout.rm_hub.reward_servers import RewardServers
from miles.utils.http_utils import aclose


class RewardServer(ThreadingHTTPServer):
    """Answers request number n with `script(n, body)`: (status, text), (status, text, headers), or None to hang up."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.script, self.bodies, self.connections = script, [], set()
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/score"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.connections.add(self.client_address)
            number = len(server.bodies)
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        reply = server.script(number, body)
        with server.lock:
            server.running -= 1
        if reply is None:
            self.close_connection = True
            return
        status, text, headers = (*reply, {})[:3]
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(text), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@contextmanager
def serving(script, port=0):
    server = RewardServer(script, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(urls, *samples, timeout_s=5.0, max_in_flight=64, metadata=False, errors=False):
    """The rewards of the samples, asked for at the same time, and the counts."""

    async def run():
        reward = RemoteReward(urls, timeout_s, max_in_flight, metadata)
        try:
            jobs = [reward.grade_sample(s.response, s) for s in samples]
            return await asyncio.gather(*jobs, return_exceptions=errors), reward.metrics()
        finally:
            await aclose()

    return asyncio.run(run())


def error_of(urls, sample, **settings):
    (error,), metrics = ask(urls, sample, errors=True, **settings)
    assert isinstance(error, RemoteRewardError)
    assert isinstance(error, HookError)
    assert metrics["rollout/reward_remote_errors"] == 1
    return str(error)


def sample(response="a", index=3, **fields):
    return Sample(index=index, response=response, **fields)


def echo(number, body):
    return 200, json.dumps(float(body["response"]))


def test_prompt_response_and_label_are_sent_as_text_and_the_body_is_the_reward():
    # Case C12.
    chat = [{"role": "user", "content": "q"}, {"role": "user", "content": [{"type": "text", "text": "r"}]}]
    with serving(lambda n, body: (200, '{"score": 0.5, "why": "so"}')) as server:
        found, _ = ask(server.url, sample(prompt=chat, label={"gold": 1}, metadata={"k": 1}))
        ask(server.url, sample(prompt="text", label="b", metadata={"k": 1}), metadata=True)
    assert found == [{"score": 0.5, "why": "so"}]
    assert server.bodies == [
        {"prompt": "user: q\nuser: r", "response": "a", "label": {"gold": 1}},
        {"prompt": "text", "response": "a", "label": "b", "metadata": {"k": 1}},
    ]


def test_text_that_utf_8_cannot_write_is_sent_all_the_same():
    with serving(lambda n, body: (200, "1")) as server:
        assert ask(server.url, sample("x\ud800y", label=["\udfff"]))[0] == [1]
    assert (server.bodies[0]["response"], server.bodies[0]["label"]) == ("x?y", ["?"])


def test_an_overloaded_server_is_asked_again_after_the_pause_it_wants():
    busy = {1: (429, "busy", {"Retry-After": "1"}), 2: (503, "starting")}
    with serving(lambda n, body: busy.get(n, (200, "1.0"))) as server:
        began = time.monotonic()
        found, metrics = ask(server.url, sample())
    assert (found, len(server.bodies)) == ([1.0], 3)
    assert metrics == {"rollout/reward_remote_retries": 2.0, "rollout/reward_remote_errors": 0.0}
    assert 1.0 < time.monotonic() - began < 4


def test_a_server_that_hangs_up_is_asked_again():
    with serving(lambda n, body: None if n <= 2 else (200, "0.25")) as server:
        assert ask(server.url, sample())[0] == [0.25]


def test_a_refused_request_is_an_error_at_once_with_the_servers_text():
    with serving(lambda n, body: (422, "no such field: label")) as server:
        text = error_of(server.url, sample())
        assert len(server.bodies) == 1
    assert f"{server.url}: refused the request with status 422: no such field: label" in text


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("", "answered nothing, not a reward"),
        ("null", "answered nothing, not a reward"),
        ('"1.0"', "answered str '1.0', not a reward"),
        ("[1.0]", "answered list [1.0], not a reward"),
        ("<html>", "is not JSON"),
        ("NaN", "is not JSON"),
        ("1.0 2.0", "is not JSON"),
        ("1e999", "not"),
    ],
)
def test_an_answer_that_is_no_reward_is_an_error_at_once(answer, problem):
    with serving(lambda n, body: (200, answer)) as server:
        text = error_of(server.url, sample())
        assert len(server.bodies) == 1
    assert server.url in text
    assert problem in text


def test_a_slow_server_is_given_up_at_the_deadline():
    with serving(lambda n, body: time.sleep(1.5) or (200, "1")) as server:
        began = time.monotonic()
        text = error_of(server.url, sample(), timeout_s=0.4)
        assert time.monotonic() - began < 1.2
    assert "gave no reward within 0.4 s, in 1 attempt; at last: no answer from" in text
    assert "reward.timeout_s" in text


def test_a_server_that_stays_away_is_given_up_at_the_deadline():
    with serving(echo) as server:
        url = server.url
    began = time.monotonic()
    text = error_of(url, sample("1"), timeout_s=1.5)
    assert time.monotonic() - began < 2.5
    assert "Connect" in text


def test_a_server_that_comes_back_is_used_again():
    with serving(echo) as server:
        port = server.server_address[1]
    ready = threading.Event()

    def later():
        time.sleep(0.4)
        with serving(echo, port):
            ready.wait(10)

    thread = threading.Thread(target=later)
    thread.start()
    try:
        assert ask(server.url, sample("0.5"))[0] == [0.5]
    finally:
        ready.set()
        thread.join()


def test_no_more_requests_than_allowed_run_at_the_same_time():
    with serving(lambda n, body: time.sleep(0.05) or echo(n, body)) as server:
        found, _ = ask(server.url, *(sample(str(i)) for i in range(20)), max_in_flight=4)
        assert found == [float(i) for i in range(20)]
        assert server.most_running <= 4
        assert len(server.connections) <= 4


def test_servers_take_turns_and_a_dead_one_is_left_alone():
    with serving(echo) as gone:
        pass
    with serving(echo) as one, serving(echo) as two:
        urls = f"{one.url}, {gone.url},{two.url}"
        found, metrics = ask(urls, *(sample(str(i)) for i in range(30)), max_in_flight=2)
    assert found == [float(i) for i in range(30)]
    assert min(len(one.bodies), len(two.bodies)) >= 8
    assert metrics["rollout/reward_remote_retries"] <= 6


def test_a_server_that_hangs_leaves_time_for_another():
    with serving(lambda n, body: time.sleep(2) or (200, "0")) as slow, serving(echo) as quick:
        assert ask(f"{slow.url},{quick.url}", sample("1"), timeout_s=1.0)[0] == [1.0]


def test_requests_that_fail_together_are_one_failure():
    servers = RewardServers(["http://a"])
    server = servers.take()
    for _ in range(50):
        server.rest(OSError("gone"), 0.0, failed=True)
    assert servers.wait_s() <= 0.5


def test_many_failures_make_a_pause_no_longer_than_five_seconds():
    server = RewardServers(["http://a"]).take()
    for _ in range(2000):
        server.resting_until = 0.0
        server.rest(OSError("gone"), 0.0, failed=True)
    assert server.resting_until - time.monotonic() <= 5


def test_a_proxy_of_the_environment_does_not_catch_loopback(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serving(echo) as server:
        assert ask(server.url, sample("1"))[0] == [1.0]


def test_a_row_may_not_ask_a_server_that_the_run_does_not_name():
    with pytest.raises(ConfigError, match="--rm-url"):
        RemoteReward(None, 1.0, 1, False)


def test_what_json_cannot_hold_is_an_error_that_says_so():
    assert "cannot be sent as JSON" in error_of("http://127.0.0.1:9", sample(label=object()))
