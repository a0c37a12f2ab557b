from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from miles.backends.torch_engine.payload import SharedMemoryCodec
from miles.backends.weight_sync.checksum import checksum_tensor
from tests.fast.torch_engine.support import Client

CODEC = SharedMemoryCodec()
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def loaded(server: Client) -> Weights:
    return load_file(server.get("/model_info")[1]["model_path"] + "/model.safetensors")


@pytest.fixture(autouse=True)
def as_it_was(server: Client, loaded: Weights) -> Iterator[None]:
    yield
    server.post("/continue_generation")
    server.post("/abort_request", {"abort_all": True})
    assert send(server, loaded, "0")[0] == 200
    assert server.get("/health")[0] == 200


def send(server: Client, weights: Weights, version: str | None, **fields: Any) -> tuple[int, Any]:
    with CODEC.encode(list(weights.items())) as bucket:
        body = {"serialized_named_tensors": [bucket.payload()], "load_format": "flattened_bucket"}
        return server.post("/update_weights_from_tensor", body | {"weight_version": version} | fields)


def moved(weights: Weights, by: float = 0.05) -> Weights:
    torch.manual_seed(1)
    return {name: tensor + by * torch.randn_like(tensor) for name, tensor in weights.items()}


def checksums(server: Client) -> dict[str, str]:
    status, answer = server.post("/weights_checker", {"action": "checksum"})
    assert status == 200
    return answer["checksums"]


@contextmanager
def one_running(server: Client) -> Iterator[Future[tuple[int, Any]]]:
    params = {"max_new_tokens": 250, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(server.post, "/generate", {"input_ids": [3, 4], "sampling_params": params})
        while server.get("/server_info")[1]["num_running"] < 1:
            assert not task.done()
        yield task


def test_control_routes_require_the_token_and_the_others_do_not(server: Client) -> None:
    for stranger in (Client(server.url), Client(server.url, "wrong")):
        for route in (
            "/abort_request",
            "/flush_cache",
            "/pause_generation",
            "/continue_generation",
            "/update_weights_from_tensor",
            "/update_weight_version",
            "/weights_checker",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ):
            status, answer = stranger.post(route)
            assert status == 401
            assert "Authorization: Bearer" in answer["error"]["message"]
        for route in ("/health", "/health_generate", "/model_info", "/server_info"):
            assert stranger.get(route)[0] == 200
        assert stranger.post("/generate", {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}})[0] == 200


def test_information_routes_say_what_runs(server: Client) -> None:
    _, info = server.get("/server_info")
    assert info["max_running_requests"] == 256
    assert (info["num_running"], info["num_waiting"], info["paused"]) == (0, 0, False)
    _, model = server.get("/model_info")
    assert (model["model_type"], model["vocab_size"], model["context_length"]) == ("qwen3", 42, 256)
    assert model["eos_token_ids"] == [1]
    status, probe = server.get("/health_generate")
    assert status == 200
    assert 0 <= probe["token"] < 42


def test_flush_drops_cached_prompts_and_is_refused_while_requests_run(server: Client) -> None:
    ids = [9, 8, 7, 6, 5]
    server.generate(ids, 1)
    assert server.generate(ids, 1)["meta_info"]["cached_tokens"] == 5
    assert server.get("/flush_cache")[0] == 200
    assert server.generate(ids, 1)["meta_info"]["cached_tokens"] == 0
    with one_running(server):
        status, answer = server.post("/flush_cache")
        assert status == 400
        assert "1 requests run, 0 wait" in answer["error"]["message"]
        server.post("/abort_request", {"abort_all": True})


def test_an_update_changes_weights_version_and_output_and_drops_old_prompts(server: Client, loaded: Weights) -> None:
    before = server.generate([5, 6, 7], 12, temperature=0)
    new = moved(loaded)
    names = list(new)
    assert send(server, {n: new[n] for n in names[:9]}, None, flush_cache=False)[0] == 200
    assert server.get("/model_info")[1]["weight_version"] == "0"
    status, answer = send(server, {n: new[n] for n in names[9:]}, "7", flush_cache=False)
    assert (status, answer["success"]) == (200, True)
    after = server.generate([5, 6, 7], 12, temperature=0)
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == "7"
    assert after["meta_info"]["cached_tokens"] == 0
    assert checksums(server) == {name: checksum_tensor(tensor) for name, tensor in new.items()}


def test_a_tied_head_may_be_sent_with_the_embedding_if_it_is_equal(server: Client, loaded: Weights) -> None:
    new = moved(loaded)
    embedding = new["model.embed_tokens.weight"]
    assert send(server, new | {"lm_head.weight": embedding.clone()}, "2")[0] == 200
    status, answer = send(server, new | {"lm_head.weight": embedding + 1}, "3")
    assert status == 400
    assert "sent with different values" in answer["error"]["message"]
    assert "lm_head.weight" not in checksums(server)


def test_a_bucket_that_does_not_fit_lists_every_tensor_and_changes_nothing(server: Client, loaded: Weights) -> None:
    before = checksums(server)
    good = moved(loaded)
    broken = dict(good)
    broken["model.norm.weigth"] = broken.pop("model.norm.weight")
    broken["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 3)
    broken["model.layers.1.mlp.up_proj.weight"] = broken["model.layers.1.mlp.up_proj.weight"].double()
    status, answer = send(server, broken, "9")
    assert status == 400
    message = answer["error"]["message"]
    assert "model.norm.weigth is not a parameter (nearest: model.norm.weight)" in message
    assert "q_proj.weight has shape [3, 3], the engine's is [64, 32]" in message
    assert "up_proj.weight has dtype float64, the engine's is float32" in message
    assert checksums(server) == before
    assert server.get("/model_info")[1]["weight_version"] == "0"
    status, health = server.get("/health")
    assert status == 503
    assert health["reason"].startswith("weights are half updated")
    assert server.get("/health_generate")[0] == 503
    assert len(server.generate([3, 4], 2, ignore_eos=True)["output_ids"]) == 2
    part = dict(list(good.items())[:3])
    assert send(server, part, "9")[0] == 200
    assert "did not send" in server.get("/health")[1]["reason"]
    assert send(server, good, None)[0] == 200
    assert server.get("/health")[0] == 503
    assert send(server, good, "10")[0] == 200
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"serialized_named_tensors": "x"}, "a list of one string"),
        ({"serialized_named_tensors": ["x", "y"]}, "a list of one string"),
        ({"load_format": None}, 'reads "flattened_bucket"'),
        ({"weight_version": 3}, "weight_version is 3; it must be of type str"),
        ({"flush": True}, "did you mean flush_cache"),
        ({"serialized_named_tensors": ["{}"]}, "JSON with shm"),
    ],
)
def test_a_bad_update_request_is_refused_with_its_reason(server: Client, fields: dict[str, Any], message: str) -> None:
    body = {"serialized_named_tensors": ["x"], "load_format": "flattened_bucket"} | fields
    status, answer = server.post("/update_weights_from_tensor", body)
    assert status == 400
    assert message in answer["error"]["message"]


def test_updates_are_refused_under_running_requests_unless_paused_or_aborted(server: Client, loaded: Weights) -> None:
    new = moved(loaded)
    with one_running(server) as task:
        status, answer = send(server, new, "1", flush_cache=False)
        assert status == 400
        assert "1 run, 0 wait; abort them, or pause generation first" in answer["error"]["message"]
        assert server.get("/health")[0] == 200
        assert server.post("/pause_generation", {"mode": "in_place"})[0] == 200
        status, answer = send(server, new, "1")
        assert status == 400
        assert "flushed only when nothing runs" in answer["error"]["message"]
        assert send(server, new, "1", flush_cache=False)[0] == 200
        assert not task.done()
        assert server.post("/continue_generation")[0] == 200
        meta = task.result()[1]["meta_info"]
        assert (meta["weight_version"], meta["completion_tokens"]) == ("1", 250)
    with one_running(server) as task:
        assert send(server, new, "2", abort_all_requests=True)[0] == 200
        meta = task.result()[1]["meta_info"]
        assert (meta["weight_version"], meta["finish_reason"]["type"]) == ("1", "abort")


def test_pause_abort_ends_requests_and_holds_new_ones_until_continue(server: Client) -> None:
    with one_running(server) as task:
        assert server.post("/pause_generation", {"mode": "abort"})[0] == 200
        assert task.result()[1]["meta_info"]["finish_reason"]["type"] == "abort"
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(server.generate, [3], 2, ignore_eos=True)
        while server.get("/server_info")[1]["num_waiting"] < 1:
            assert not held.done()
        assert server.get("/health_generate")[0] == 200
        assert server.post("/flush_cache")[0] == 400
        assert not held.done()
        server.post("/continue_generation")
        assert len(held.result()["output_ids"]) == 2


def test_an_unknown_pause_mode_is_refused_with_the_known_ones(server: Client) -> None:
    status, answer = server.post("/pause_generation", {"mode": "stop"})
    assert status == 400
    assert '\'stop\'; use "abort", "in_place" or "retract"' in answer["error"]["message"]
    assert server.get("/server_info")[1]["paused"] is False


def test_retracted_requests_wait_and_resume_from_their_tokens_so_far(server: Client, loaded: Weights) -> None:
    params = {"ignore_eos": True, "sampling_seed": 5, "temperature": 0.8}
    body = {"input_ids": [3, 4, 5], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body["sampling_params"] = params | {"max_new_tokens": 250}
    whole = server.post("/generate", body)[1]
    with ThreadPoolExecutor(1) as pool:
        before = server.get("/server_info")[1]["counters"]
        task = pool.submit(server.post, "/generate", body)
        while server.get("/server_info")[1]["num_running"] < 1:
            assert not task.done()
        assert server.post("/pause_generation", {"mode": "retract"})[0] == 200
        info = server.get("/server_info")[1]
        assert (info["num_running"], info["num_waiting"]) == (0, 1)
        status, answer = server.post("/flush_cache")
        assert status == 400
        assert "0 requests run, 1 wait" in answer["error"]["message"]
        assert send(server, loaded, "6", flush_cache=True)[0] == 400
        assert send(server, loaded, "6", flush_cache=False)[0] == 200
        assert not task.done()
        assert server.post("/continue_generation")[0] == 200
        status, made = task.result()
    assert status == 200
    after = server.get("/server_info")[1]["counters"]
    assert after["prefill_tokens"] - before["prefill_tokens"] > 3 + 3
    assert after["prompt_tokens"] - before["prompt_tokens"] == 3
    assert made["output_ids"] == whole["output_ids"]
    assert made["meta_info"]["weight_version"] == "6"
    for name in ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs", "input_top_logprobs"):
        assert len(made["meta_info"][name]) == len(whole["meta_info"][name])
    for (value, _, _), (expected, _, _) in zip(
        made["meta_info"]["output_token_logprobs"], whole["meta_info"]["output_token_logprobs"], strict=True
    ):
        assert value == pytest.approx(expected, abs=1e-4)


def test_a_retracted_request_can_be_aborted_with_its_tokens_so_far(server: Client) -> None:
    with one_running(server) as task:
        assert server.post("/pause_generation", {"mode": "retract"})[0] == 200
        assert server.post("/abort_request", {"abort_all": True})[1]["num_aborted"] == 1
        answer = task.result()[1]
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 250
        assert server.post("/flush_cache")[0] == 200


def test_a_version_can_be_set_without_disturbing_requests(server: Client) -> None:
    with one_running(server) as task:
        assert server.post("/update_weight_version", {"new_version": "41"})[0] == 200
        assert task.result()[1]["meta_info"]["weight_version"] == "41"
    status, answer = server.post("/update_weight_version")
    assert (status, answer["error"]["message"]) == (400, "new_version is missing")
    with one_running(server) as task:
        body = {"new_version": "42", "abort_all_requests": True}
        assert server.post("/update_weight_version", body)[0] == 200
        assert task.result()[1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_reset_and_compare_find_every_parameter_that_was_not_sent(server: Client, loaded: Weights) -> None:
    assert server.post("/weights_checker", {"action": "snapshot"})[0] == 200
    assert server.post("/weights_checker", {"action": "compare"})[0] == 200
    assert server.post("/weights_checker", {"action": "reset_tensors"})[0] == 200
    forgotten = "model.layers.1.mlp.down_proj.weight"
    assert send(server, {n: t for n, t in loaded.items() if n != forgotten}, "0")[0] == 200
    status, answer = server.post("/weights_checker", {"action": "compare"})
    assert status == 400
    assert f"1 parameters differ from the snapshot: {forgotten}" in answer["error"]["message"]
    assert send(server, {forgotten: loaded[forgotten]}, "0")[0] == 200
    assert server.post("/weights_checker", {"action": "compare"})[0] == 200
    status, answer = server.post("/weights_checker", {"action": "check"})
    assert status == 400
    assert "use checksum, snapshot, reset_tensors or compare" in answer["error"]["message"]


def test_garbage_is_refused_under_running_requests(server: Client) -> None:
    with one_running(server):
        assert server.post("/weights_checker", {"action": "reset_tensors"})[0] == 400
        server.post("/abort_request", {"abort_all": True})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give either"),
        ({"rid": "a", "abort_all": True}, "give either"),
        ({"ridd": "a"}, "did you mean rid"),
        ({"rid": 3}, "rid is 3; it must be of type str"),
        ([], "JSON object"),
        (b"{", "not JSON"),
    ],
)
def test_a_bad_abort_is_refused_with_its_reason(server: Client, body: Any, message: str) -> None:
    status, answer = server.post("/abort_request", body)
    assert status == 400
    assert message in answer["error"]["message"]


def test_aborting_an_unknown_request_is_no_error(server: Client) -> None:
    assert server.post("/abort_request", {"rid": "nobody"})[1]["num_aborted"] == 0
