import base64
import io
import pickle

import torch

from miles.backends.sglang_utils.payload import CudaIpcCodec

ACCEPTED = ("builtins.", "collections.", "copyreg.", "types.", "torch.", "multiprocessing.resource_sharer.")
"""Of what SGLang 0.5.17 accepts in a pickle, what a payload needs."""


class StrictUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        assert f"{module}.{name}".startswith(ACCEPTED), f"{module}.{name}"
        assert name not in ("CodeType", "FunctionType")
        return super().find_class(module, name)


def received(payload):
    return StrictUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()


def test_a_bucket_arrives_as_a_flat_tensor_with_the_borders_of_each_parameter():
    tensors = [
        ("a", torch.randn(3, 5).bfloat16()),
        ("b", torch.randn(7)),
        ("c", torch.randn(4, 6).T),
        ("empty", torch.zeros(0, 2)),
    ]
    bucket = CudaIpcCodec().encode(tensors)
    found = received(bucket.payload())
    flat = found["flattened_tensor"]
    assert flat.dtype is torch.uint8
    for (name, tensor), entry in zip(tensors, found["metadata"], strict=True):
        assert (entry.name, entry.dtype, entry.numel) == (name, tensor.dtype, tensor.nbytes)
        part = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        assert torch.equal(part, tensor)
    bucket.close()


def test_each_process_gets_a_handle_of_its_own():
    bucket = CudaIpcCodec().encode([("a", torch.arange(4.0))])
    first, second = (received(bucket.payload())["flattened_tensor"] for _ in range(2))
    assert torch.equal(first, second)
    bucket.close()
    bucket.close()
