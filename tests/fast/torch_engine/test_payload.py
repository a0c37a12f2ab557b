import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from miles.backends.torch_engine import payload
from miles.backends.torch_engine.payload import SharedMemoryCodec
from miles.backends.weight_sync.checksum import checksum_tensor

CODEC = SharedMemoryCodec()


def some_tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).to(torch.bfloat16)),
        ("transposed", torch.randn(4, 6).t()),
        ("scalar", torch.tensor(3.5)),
        ("empty", torch.empty(0, 2)),
        ("bytes", torch.arange(9, dtype=torch.uint8)),
    ]


def test_a_bucket_round_trips_names_dtypes_shapes_and_bits() -> None:
    sent = some_tensors()
    with CODEC.encode(sent) as bucket:
        received = CODEC.decode(bucket.payload())
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (_, before), (_, after) in zip(sent, received, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert torch.equal(before, after)


def test_an_empty_bucket_round_trips() -> None:
    with CODEC.encode([]) as bucket:
        assert CODEC.decode(bucket.payload()) == []


def test_a_closed_bucket_leaves_nothing_and_says_why_it_cannot_be_read() -> None:
    bucket = CODEC.encode(some_tensors())
    path = payload._folder() / json.loads(bucket.payload())["shm"]
    assert path.exists()
    bucket.close()
    bucket.close()
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match="closed the bucket before it was read"):
        CODEC.decode(bucket.payload())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shm": "../etc/passwd"}, "not the name of a weight bucket"),
        ({"nbytes": 10**9}, "holds .* bytes, the payload announces"),
        ({"nbytes": -1}, "not a size"),
        ({"tensors": 3}, "JSON with shm, nbytes and tensors"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [2], "start": 0, "end": 4}]}, "do not hold shape"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [2], "start": -8, "end": 0}]}, "lie outside"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [99999], "start": 0, "end": 399996}]}, "lie outside"),
        ({"tensors": [{"name": "a", "dtype": "Tensor", "shape": [2], "start": 0, "end": 8}]}, "is not a dtype"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [-2], "start": 0, "end": 8}]}, "is not a shape"),
    ],
)
def test_a_payload_that_lies_is_refused(change: dict[str, object], message: str) -> None:
    with CODEC.encode(some_tensors()) as bucket:
        broken = json.dumps(json.loads(bucket.payload()) | change)
        with pytest.raises(ValueError, match=message):
            CODEC.decode(broken)


def test_full_shared_memory_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(payload._folder().glob("miles-weights-*"))
    with pytest.raises(OSError, match="lower --update-weight-buffer-size"):
        CODEC.encode(some_tensors())
    assert set(payload._folder().glob("miles-weights-*")) <= before


def test_buckets_of_a_dead_owner_are_removed_and_those_of_a_living_one_are_not() -> None:
    folder = payload._folder()
    orphan = folder / f"miles-weights-{'0' * 32}"
    orphan.write_bytes(b"x")
    living = CODEC.encode(some_tensors())
    living_path = folder / json.loads(living.payload())["shm"]
    old = time.time() - 3600
    os.utime(orphan, (old, old))
    os.utime(living_path, (old, old))
    with CODEC.encode([("a", torch.ones(1))]):
        assert not orphan.exists()
        assert living_path.exists()
    living.close()


def test_another_process_reads_a_bucket_without_a_warning_and_leaves_it_in_place(tmp_path: Path) -> None:
    with CODEC.encode(some_tensors()) as bucket:
        code = (
            "import sys; from miles.backends.torch_engine.payload import SharedMemoryCodec\n"
            "print(sum(t.numel() for _, t in SharedMemoryCodec().decode(sys.argv[1])))\n"
            "assert not any(m.split('.')[0] in ('transformers', 'ray') for m in sys.modules)"
        )
        child = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, bucket.payload()], capture_output=True, text=True, timeout=60
        )
        assert (child.returncode, child.stdout.strip(), child.stderr) == (0, "56", "")
        assert len(CODEC.decode(bucket.payload())) == 6


def test_a_checksum_depends_on_values_dtype_and_shape_but_not_on_strides() -> None:
    t = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert checksum_tensor(t) == checksum_tensor(t.t().contiguous().t())
    others = [t + 1, t.double(), t.reshape(3, 2), t.reshape(6), t.to(torch.bfloat16), torch.empty(0)]
    assert len({checksum_tensor(x) for x in [t, *others]}) == 7
    assert checksum_tensor(torch.nn.Parameter(t)) == checksum_tensor(t)
    assert checksum_tensor(torch.tensor(1.0)) != checksum_tensor(torch.tensor([1.0]))
