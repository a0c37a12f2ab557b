"""Weights through a process group and from a folder, at a served engine."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.distributed_c10d import _new_process_group_helper

from miles.backends.weight_sync.broadcast import flatten
from miles.backends.weight_sync.checksum import checksum_tensor
from miles.backends.weight_sync.process_group import UpdateGroup, serve_store


def weights(folder, scale=1.0):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) * scale for name in file.keys()}  # noqa: SIM118


def checksums(server):
    status, answer = server.post("/weights_checker", {"action": "checksum"})
    assert status == 200, answer
    return answer["checksums"]


class Source:
    """Rank 0 of a group whose rank 1 is the engine."""

    def __init__(self, server, name):
        self.server, self.name = server, name
        store, port = serve_store("127.0.0.1", 20)
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        self.pool = ThreadPoolExecutor()
        joined = self.pool.submit(server.post, "/init_weights_update_group", body | {"group_name": name})
        self.group = UpdateGroup(store, name, 0, 2, "127.0.0.1", 20)
        self.answer = joined.result()

    def announce(self, tensors, **more):
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": self.name,
        }
        return self.pool.submit(self.server.post, "/update_weights_from_distributed", body | more)

    def close(self):
        self.group.close()
        self.pool.shutdown()


@pytest.fixture
def source(server, request):
    source = Source(server, f"group of {request.node.name}")
    assert source.answer[0] == 200, source.answer
    yield source
    source.close()


@pytest.fixture(autouse=True)
def whole_again(server, model_folder):
    yield
    status, answer = server.post(
        "/update_weights_from_disk", {"model_path": str(model_folder), "weight_version": "end"}
    )
    assert status == 200, answer
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("flattened", [True, False])
def test_a_broadcast_replaces_the_weights(server, model_folder, source, flattened):
    tensors = weights(model_folder, 1.5)
    more = {"load_format": "flattened_bucket"} if flattened else {}
    answer = source.announce(tensors, weight_version="7", **more)
    for tensor in [flatten(list(tensors.values()))] if flattened else tensors.values():
        source.group.broadcast(tensor)
    assert answer.result()[0] == 200, answer.result()
    assert checksums(server) == {name: checksum_tensor(t) for name, t in tensors.items()}
    assert server.get("/model_info")[1]["weight_version"] == "7"
    assert server.post("/destroy_weights_update_group", {"group_name": source.name})[0] == 200


def test_the_engine_answers_and_generates_while_it_waits_for_a_broadcast(server, model_folder, source):
    tensors = weights(model_folder, 1.5)
    answer = source.announce(tensors, load_format="flattened_bucket", weight_version="8")
    time.sleep(0.3)
    assert not answer.done()
    assert server.get("/health")[0] == 200
    assert server.generate([2, 3], 4)["meta_info"]["weight_version"] != "8"
    source.group.broadcast(flatten(list(tensors.values())))
    assert answer.result()[0] == 200
    assert server.generate([2, 3], 4)["meta_info"]["weight_version"] == "8"


def test_a_bucket_that_does_not_fit_is_refused_with_all_that_is_wrong_and_the_sender_does_not_hang(
    server, model_folder, source
):
    before = checksums(server)
    wrong = {
        "language_model.model.norm.weight": torch.zeros(32),
        "model.norm.weight": torch.zeros(31),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(48, 32, dtype=torch.bfloat16),
    }
    answer = source.announce(wrong)
    for tensor in wrong.values():
        source.group.broadcast(tensor)
    status, body = answer.result()
    message = body["error"]["message"]
    assert status == 400
    for told in (
        "language_model.model.norm.weight is not a parameter (nearest: model.norm.weight)",
        "model.norm.weight has shape [31], the engine's is [32]",
        "model.layers.0.mlp.up_proj.weight has dtype bfloat16, the engine's is float32",
    ):
        assert told in message
    assert checksums(server) == before
    status, health = server.get("/health")
    assert (status, "half updated" in health["reason"]) == (503, True)


def test_a_sender_that_goes_away_leaves_an_error_and_an_engine_that_says_it_is_half_updated(
    server, model_folder, source
):
    answer = source.announce(weights(model_folder), load_format="flattened_bucket")
    time.sleep(0.2)
    started_at = time.monotonic()
    source.group.close()
    status, body = answer.result()
    assert status == 400
    assert "the broadcast broke off" in body["error"]["message"]
    assert time.monotonic() - started_at < 5
    assert server.get("/health")[0] == 503
    status, body = server.post("/destroy_weights_update_group", {"group_name": source.name})
    assert (status, "no group" in body["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rank_offset": 0}, "describe a group whose rank 0 sends"),
        ({"backend": "nccl"}, "receives through"),
        ({"master_port": None}, "describe a group"),
        ({"pp_rank": 1}, "pp_rank"),
    ],
)
def test_a_group_that_is_described_wrongly_is_refused_at_once(server, change, told):
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "wrong"}
    status, answer = server.post("/init_weights_update_group", body | change)
    assert (status, told in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"group_name": "nobody"}, "there is no group 'nobody'"),
        ({"shapes": []}, "one entry for each tensor"),
        ({"dtypes": ["nn"]}, "'nn' is not a dtype"),
        ({"shapes": [[-1]]}, "is not a shape"),
        ({"load_format": "sharded"}, "load_format is 'sharded'"),
    ],
)
def test_a_bucket_that_is_announced_wrongly_is_refused_at_once(server, change, told):
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]], "group_name": "nobody"}
    status, answer = server.post("/update_weights_from_distributed", body | change)
    assert (status, told in answer["error"]["message"]) == (400, True), answer


def test_a_member_that_joins_by_torchs_own_helper_finds_the_source():
    """As an engine would that does not use this package."""
    store, port = serve_store("127.0.0.1", 20)
    received = torch.zeros(5, dtype=torch.bfloat16)
    failures = []

    def stranger():
        try:
            client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
            group, _ = _new_process_group_helper(
                2, 1, [], "gloo", dist.PrefixStore("w", client), group_name="w", timeout=timedelta(seconds=20)
            )
            group.broadcast(received, 0).wait()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=stranger)
    thread.start()
    group = UpdateGroup(store, "w", 0, 2, "127.0.0.1", 20)
    group.broadcast(torch.arange(5, dtype=torch.bfloat16))
    thread.join()
    group.close()
    assert failures == []
    assert received.tolist() == [0, 1, 2, 3, 4]


def sharded(model_folder, target, tensors):
    """A folder of two shards with an index."""
    target.mkdir()
    shutil.copyfile(model_folder / "config.json", target / "config.json")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({n: tensors[n] for n in held}, target / file)
    save_file({"stray": torch.zeros(1)}, target / "not-in-the-index.safetensors")
    weight_map = {n: file for file, held in files.items() for n in held}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def test_a_folder_replaces_the_weights_cast_to_the_engines_dtype(server, model_folder, tmp_path):
    tensors = {n: t.to(torch.bfloat16) for n, t in weights(model_folder, 1.5).items()}
    folder = sharded(model_folder, tmp_path / "new", tensors)
    status, answer = server.post(
        "/update_weights_from_disk", {"model_path": str(folder), "weight_version": "9", "load_format": "auto"}
    )
    assert status == 200, answer
    assert checksums(server) == {n: checksum_tensor(t.float()) for n, t in tensors.items()}
    assert server.get("/model_info")[1]["weight_version"] == "9"


def test_a_folder_that_does_not_fit_is_refused_and_the_engine_goes_on_with_what_it_had(server, model_folder, tmp_path):
    before = checksums(server)
    tensors = load_file(model_folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3)
    folder = sharded(model_folder, tmp_path / "unfit", tensors)
    status, answer = server.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "10"})
    message = answer["error"]["message"]
    assert status == 400
    assert "the weights are as they were" in message
    assert "model.layers.0.mlp.up_proj.weight has shape [3]" in message
    assert "model.norm.weight is missing" in message
    assert checksums(server) == before
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "is not a folder that this engine can see"),
        (lambda path: path.mkdir(), "holds no *.safetensors"),
        (lambda path: (path.mkdir(), (path / "x.safetensors").write_bytes(b"half")), "cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(server, tmp_path, make, told):
    make(tmp_path / "folder")
    status, answer = server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "folder")})
    assert (status, told in answer["error"]["message"]) == (400, True), answer


def test_a_folder_with_a_tied_head_that_differs_from_the_embedding_is_refused(server, model_folder, tmp_path):
    """G09: the file holds both, and config.json ties them."""
    tensors = load_file(model_folder / "model.safetensors")
    equal = sharded(
        model_folder, tmp_path / "equal", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    )
    assert server.post("/update_weights_from_disk", {"model_path": str(equal)})[0] == 200
    other = sharded(
        model_folder, tmp_path / "other", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}
    )
    status, answer = server.post("/update_weights_from_disk", {"model_path": str(other)})
    assert (status, "ties lm_head.weight" in answer["error"]["message"]) == (400, True), answer
