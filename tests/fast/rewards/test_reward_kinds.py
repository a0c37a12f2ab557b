import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from miles.config.schema import RunConfig
from miles.config.sections.reward import RewardConfig
from miles.core.hook_args import HookArgs
from miles.core.run_facts import RunFacts
from miles.core.samples import Sample
from miles.errors import ConfigError, DataError, HookError
from miles.rollout.rm_hub.hub import RewardHub
from miles.utils.http_utils import aclose


def grade(response="", *, label=None, metadata=None, prompt="", **settings):
    config = RunConfig(reward=RewardConfig(timeout_s=10, **settings))

    async def run():
        hub = RewardHub(HookArgs(config, RunFacts(run_dir="")))
        sample = Sample(index=7, group_index=3, prompt=prompt, response=response, label=label, metadata=metadata or {})
        try:
            reward = await hub.grade(sample)
            assert sample.reward == reward
            return reward
        finally:
            await hub.close()
            await aclose()

    return asyncio.run(run())


@pytest.fixture
def server():
    """A server that answers with what `server.reward` is."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            text = json.dumps(self.server.reward).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.bodies, server.url = [], f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_rows_type_wins_over_the_runs_and_a_custom_function_over_both(tmp_path, monkeypatch):
    (tmp_path / "reward_of_kinds.py").write_text("async def nine(args, sample, **kwargs):\n    return 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert grade("The answer is C", label="C", rm_type="exact") == 0
    assert grade("The answer is C", label="C", rm_type="exact", metadata={"rm_type": "gpqa"}) == 1
    path = "reward_of_kinds.nine"
    assert grade("C", label="C", rm_type="exact", metadata={"rm_type": "gpqa"}, custom_rm_path=path) == 9


@pytest.mark.parametrize("name", ["gqpa", "boxed_gqpa", 5, ["math"]])
def test_a_row_with_an_unknown_type_is_an_error_that_names_it(name):
    with pytest.raises(DataError) as caught:
        grade("x", label="x", rm_type="exact", metadata={"rm_type": name})
    assert f"--rm-type {name}: sample 7 (group 3): there is no such built-in reward" in str(caught.value)
    assert "the built-in rewards are math, " in str(caught.value)


def test_boxed_math_wants_a_box_and_reads_it_once():
    # Case A01.
    assert grade(r"Answer: \boxed{5}", label="5", rm_type="boxed_math") == 1
    assert grade(r"Answer: \boxed{6}", label="5", rm_type="boxed_math") == 0
    assert grade("Answer: 5", label="5", rm_type="boxed_math") == 0
    assert grade(r"Answer: \boxed{\boxed{5}}", label="5", rm_type="boxed_math") == 1
    assert grade(r"It is \boxed{x=5}", label="5", rm_type="boxed_math") == grade(
        r"It is \boxed{x=5}", label="5", rm_type="math"
    )


def test_any_type_can_be_boxed():
    assert grade(r"not Rome but \boxed{ Paris }", label="Paris", rm_type="boxed_exact") == 1
    assert grade("Paris", label="Paris", rm_type="boxed_exact") == 0
    assert grade(r"A is wrong; \boxed{\text{C}}", label="C", rm_type="boxed_gpqa") == 1
    assert grade("The answer is C", label="C", rm_type="boxed_gpqa") == 0
    assert grade(r"word word \boxed{the Beatles}", label="beatles", rm_type="boxed_f1") == 1


def test_a_boxed_reward_without_a_box_still_wants_its_label():
    with pytest.raises(DataError, match="the row has no label"):
        grade("no box", rm_type="boxed_exact")


def test_a_remote_reward_is_judged_like_a_functions(server):
    server.reward = {"score": 0.5, "style": "good"}
    reward = grade("r", label="l", prompt="p", rm_type="remote_rm", rm_url=server.url, reward_key="score")
    assert reward == {"score": 0.5, "style": "good"}
    assert server.bodies == [{"prompt": "p", "response": "r", "label": "l"}]
    with pytest.raises(HookError) as caught:
        grade("r", rm_type="remote_rm", rm_url=server.url, reward_key="total")
    assert "--rm-type remote_rm: on sample 7 (group 3)" in str(caught.value)
    assert "the reward object has no 'total', only ['score', 'style']" in str(caught.value)


def test_a_boxed_remote_reward_sends_the_box(server):
    server.reward = 1
    assert grade(r"so \boxed{5}", rm_type="boxed_remote_rm", rm_url=server.url) == 1.0
    assert server.bodies[0]["response"] == "5"


def test_a_row_that_asks_a_server_in_a_run_without_one_is_a_configuration_error():
    with pytest.raises(ConfigError, match="no server is named"):
        grade("x", rm_type="exact", metadata={"rm_type": "remote_rm"})
