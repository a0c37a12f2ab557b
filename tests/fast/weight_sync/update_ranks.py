"""Trainer ranks over gloo in processes of their own, which send one update together to engines at GPUs that they name."""

# python -m tests.fast.weight_sync.update_ranks FOLDER    plays the cases of FOLDER/cases.json, one after another, and writes
# what became of each at each rank into FOLDER/NAME.RANK.json

import asyncio
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from miles.backends.torch_engine.payload import SharedMemoryCodec
from miles.backends.torch_engine.payload import _folder as shared_memory
from miles.backends.weight_sync import lifecycle
from miles.backends.weight_sync import tensor as tensor_module
from miles.backends.weight_sync.checksum import checksum_tensor
from miles.config.schema import RunConfig
from miles.core.run_facts import EngineEndpoint
from miles.ray.train_actor import TrainActor
from miles.utils import http_utils


class NotingCodec(SharedMemoryCodec):
    """Notes its segments and how many of them are there at once, and fails at a bucket when it is told to."""

    def __init__(self, fails_at=None):
        self.fails_at, self.segments, self.frees = fails_at, [], []

    def encode(self, named_tensors):
        if len(self.segments) == self.fails_at:
            raise OSError("no room for a bucket")
        bucket = super().encode(named_tensors)
        path, close = bucket._path, bucket.close
        self.segments.append(path.name)

        def note_close():
            self.frees.append(path.exists())
            close()

        bucket.close = note_close
        return bucket


class StandIn:
    """A worker of a trainer rank that has the model of a folder, with every weight multiplied by `scale`."""

    def __init__(self, config, *, rank, world_size, store, scale):
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
        stored = load_file(Path(config.model.hf_checkpoint) / "model.safetensors")
        self.tensors = [(name, tensor.float() * scale) for name, tensor in stored.items()]
        self.gathered = 0

    def warm_up(self):
        """It compiles nothing."""

    def hf_weights(self):
        for pair in self.tensors:
            self.gathered += 1
            yield pair

    def expected_weights(self):
        return {name: tensor.nbytes for name, tensor in self.tensors}


class Posts:
    """Notes the segments that rank 0 tells each engine of, and whether all are there when every engine has answered."""

    def __init__(self):
        self.segments, self.kept, self._post = [], [], tensor_module._post
        tensor_module._post = self

    async def __call__(self, engines, payloads, version):
        named = [[json.loads(payload)["shm"] for payload in own] for own in payloads]
        self.segments.append(named)
        await self._post(engines, payloads, version)
        self.kept.append(all((shared_memory() / name).exists() for own in named for name in own))


async def send(actor, engines):
    """What rank 0 has sent, and what the engines hold then; of another rank nothing."""
    try:
        sent = await actor.send_weights(engines, 1)
        return {} if sent is None else {"buckets": sent.buckets, "held": await lifecycle.checksums(engines)}
    finally:
        await http_utils.aclose()


def play_rank(case, rank):
    """What became of the update at a rank."""
    gpus = case["gpus"]
    config = RunConfig.model_validate(
        {"model": {"hf_checkpoint": case["folder"]}, "weights": {"buffer_size": case["bucket_bytes"]}}
    )
    actor = TrainActor(case["run_dir"], rank, tuple(gpus[rank]))
    init = {"world_size": len(gpus), "store": case["store"], "scale": case["scale"]}
    worker_path, codec_path = (f"{c.__module__}.{c.__qualname__}" for c in (StandIn, SharedMemoryCodec))
    actor.start(config, worker_path, codec_path, init, None)
    codec = actor._codec = NotingCodec(case["fails"].get(str(rank)))
    engines = [EngineEndpoint(**{**e, "gpu_ids": tuple(e["gpu_ids"])}) for e in case["engines"]]
    wanted = {name: checksum_tensor(tensor) for name, tensor in actor._worker.tensors}
    found, posts = {"error": "", "type": "", "wanted": wanted}, Posts()
    try:
        found |= asyncio.run(send(actor, engines))
    except Exception as error:
        found |= {"error": str(error), "type": type(error).__name__}
    dist.barrier()  # whoever waits for a rank that has ended would hang here
    found |= {"posts": posts.segments, "kept": posts.kept, "segments": codec.segments, "frees": codec.frees}
    return found | {"gathered": actor._worker.gathered}


def play(case, folder):
    """Fork the ranks of a case and wait for them; the first that fails ends the others."""
    pids = {}
    for rank in range(len(case["gpus"])):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(play_rank(case, rank)))
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)  # a gloo thread may still hold a tensor, for which it would need an interpreter
        pids[pid] = rank
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"rank {rank} of {case['name']} ended with status {status}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    place = Path(sys.argv[1])
    for each in json.loads((place / "cases.json").read_text()):
        play(each, place)
