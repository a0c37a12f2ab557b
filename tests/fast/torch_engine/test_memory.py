import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from miles.backends.torch_engine.payload import SharedMemoryCodec
from miles.utils.process import ServerProcess
from tests.fast.torch_engine.support import Client, make_model

TAGS = ["weights", "kv_cache"]
LARGE = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 16000,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("large"), **LARGE)


@pytest.fixture(scope="module")
def client(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    command = [sys.executable, "-m", "miles.backends.torch_engine", "--model-path", str(large), "--threads", "1"]
    process = ServerProcess(
        "torch-engine", [*command, "--exit-on-stdin-close"], tmp_path_factory.mktemp("log") / "engine.log"
    )
    try:
        yield Client(f"http://127.0.0.1:{process.wait_ready(120)['port']}")
    finally:
        process.stop()


def resident_mb(client: Client) -> float:
    return psutil.Process(client.get("/server_info")[1]["pid"]).memory_info().rss / 2**20


def send(client: Client, weights: dict[str, torch.Tensor], version: str | None) -> tuple[int, Any]:
    with SharedMemoryCodec().encode(list(weights.items())) as bucket:
        body = {"serialized_named_tensors": [bucket.payload()], "load_format": "flattened_bucket"}
        return client.post("/update_weights_from_tensor", body | {"weight_version": version, "flush_cache": False})


def test_a_release_frees_weights_and_kv_until_they_are_resumed_and_sent_again(client: Client, large: Path) -> None:
    weights = load_file(large / "model.safetensors")
    weights_mb = sum(t.numel() * t.element_size() for t in weights.values()) / 2**20
    assert weights_mb > 50
    before = client.generate([3, 4, 5] * 80, 4, temperature=0, ignore_eos=True)
    checksums = client.post("/weights_checker", {"action": "checksum"})[1]["checksums"]

    loaded = resident_mb(client)
    assert client.post("/release_memory_occupation", {"tags": TAGS})[0] == 200
    assert loaded - resident_mb(client) > 0.9 * weights_mb
    status, health = client.get("/health")
    assert status == 503
    assert "the weights are released" in health["reason"]
    assert client.get("/health_generate")[0] == 503
    status, answer = client.post("/generate", {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}})
    assert status == 503
    assert "the weights are released" in answer["error"]["message"]
    for action in ("checksum", "snapshot", "reset_tensors"):
        status, answer = client.post("/weights_checker", {"action": action})
        assert status == 400
        assert "/resume_memory_occupation with the tag weights" in answer["error"]["message"]
    assert send(client, weights, "1")[0] == 400
    assert client.post("/release_memory_occupation", {"tags": TAGS})[0] == 200

    assert client.post("/resume_memory_occupation", {"tags": ["weights"]})[0] == 200
    assert client.post("/resume_memory_occupation", {"tags": ["weights"]})[0] == 200
    assert "zeros until a complete update" in client.get("/health")[1]["reason"]
    assert client.post("/generate", {"input_ids": [3]})[0] == 503
    names = list(weights)
    assert send(client, {n: weights[n] for n in names[:9]}, None)[0] == 200
    assert client.get("/health")[0] == 503
    assert send(client, {n: weights[n] for n in names[9:]}, "1")[0] == 200
    assert client.post("/weights_checker", {"action": "checksum"})[1]["checksums"] == checksums
    assert "the KV cache is released" in client.get("/health")[1]["reason"]
    assert client.post("/generate", {"input_ids": [3]})[0] == 503
    assert client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})[0] == 200
    assert client.get("/health")[0] == 200
    after = client.generate([3, 4, 5] * 80, 4, temperature=0, ignore_eos=True)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0
    assert client.get("/health_generate")[0] == 200

    assert client.post("/release_memory_occupation")[0] == 200
    assert client.post("/resume_memory_occupation")[0] == 200
    part = {n: weights[n] for n in names[1:]}
    assert send(client, part, "2")[0] == 200
    assert "did not send 1 of" in client.get("/health")[1]["reason"]
    assert client.post("/generate", {"input_ids": [3]})[0] == 503
    assert send(client, weights, "2")[0] == 200
    assert client.get("/health")[0] == 200


def test_releasing_only_the_kv_frees_slots_and_prompts_and_keeps_the_weights(client: Client) -> None:
    for route in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert client.post(route, {"tags": ["kv_cache"]})[0] == 200
    client.generate([3], 1)
    small = resident_mb(client)
    ids = [5, 6] * 100
    made = client.generate(ids, 50, temperature=0, ignore_eos=True)
    # Enough that the slots are one allocation of over 32 MiB, which malloc takes from the system and gives back to it.
    slots_mb = 16 * 200 * 8 * 2 * 8 * 64 * 4 / 2**20
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: client.generate([i, *ids[1:]], 50, ignore_eos=True), range(2, 18)))
    grown = resident_mb(client)
    assert grown - small > slots_mb * 0.9
    assert client.post("/release_memory_occupation", {"tags": ["kv_cache"]})[0] == 200
    assert grown - resident_mb(client) > slots_mb * 0.9
    assert "KV cache is released" in client.get("/health")[1]["reason"]
    assert client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})[0] == 200
    again = client.generate(ids, 50, temperature=0, ignore_eos=True)
    assert again["output_ids"] == made["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 0


def test_memory_is_kept_while_requests_run_or_wait(server: Client) -> None:
    body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 250, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        assert server.post("/pause_generation", {"mode": "in_place"})[0] == 200
        task = pool.submit(server.post, "/generate", body)
        while server.get("/server_info")[1]["num_waiting"] < 1:
            assert not task.done()
        for tags in (["weights"], ["kv_cache"], TAGS):
            status, answer = server.post("/release_memory_occupation", {"tags": tags})
            assert status == 400
            assert "0 requests run, 1 wait" in answer["error"]["message"]
        assert server.post("/continue_generation")[0] == 200
        assert task.result()[0] == 200
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["weight"], "tags holds weight; known are weights, kv_cache"),
        ("weights", "must be of type list"),
        ([1], "list of strings"),
    ],
)
def test_bad_tags_are_refused_and_release_nothing(server: Client, tags: Any, message: str) -> None:
    for route in ("/release_memory_occupation", "/resume_memory_occupation"):
        status, answer = server.post(route, {"tags": tags})
        assert status == 400
        assert message in answer["error"]["message"]
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("before", ["checksum", "snapshot"])
def test_weights_sent_after_a_release_are_computed_with_whatever_was_asked_before(before: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    command = [sys.executable, "-m", "miles.backends.torch_engine", "--model-path", str(folder), "--threads", "1"]
    process = ServerProcess("torch-engine", [*command, "--exit-on-stdin-close"], tmp_path / "engine.log")
    try:
        client = Client(f"http://127.0.0.1:{process.wait_ready(120)['port']}")
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        changed = {name: tensor * 1.1 for name, tensor in weights.items()}
        assert send(client, changed, "1")[0] == 200
        expected = client.generate([3, 4, 5], 4, temperature=0, ignore_eos=True)
        assert send(client, weights, "2")[0] == 200
        assert client.post("/weights_checker", {"action": before})[0] == 200
        assert client.post("/release_memory_occupation", {"tags": TAGS})[0] == 200
        assert client.post("/resume_memory_occupation", {"tags": TAGS})[0] == 200
        assert send(client, changed, "3")[0] == 200
        again = client.generate([3, 4, 5], 4, temperature=0, ignore_eos=True)
        assert again["output_ids"] == expected["output_ids"]
        assert again["meta_info"]["output_token_logprobs"] == expected["meta_info"]["output_token_logprobs"]
    finally:
        process.stop()
